"""Describe the turns of a run's agents by quantiles, for the simulation of layouts.

    python benchmarks/tool_latency.py runs/calcx_cpu --json benchmarks/calcx_turns.json

The turns are those of the training rollouts that were scored. A turn is a call and the time until
the next call of its rollout, which is what the agent and its tools take. The time after the last
call is not in the record. A rollout that calls twice at once has no such time.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Span

PROBABILITIES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Turns:
    """Turns of many rollouts, one entry for each rollout, call or gap between two calls."""

    num_calls: tuple[int, ...]
    first_prompt_tokens: tuple[int, ...]
    added_prompt_tokens: tuple[int, ...]  # of later calls, beyond the tokens of the call before
    response_tokens: tuple[int, ...]
    tool_s: tuple[float, ...]


def turns_of(rollouts: Sequence[Sequence[Span]]) -> Turns:
    """Return the turns of rollouts whose spans are in order of their start."""
    first, added, responses, gaps, numbers = [], [], [], [], []
    for spans in rollouts:
        calls = [span for span in spans if attributes.RESPONSE_TOKEN_IDS in span.attributes]
        if not calls:
            continue
        prompts = [len(call.attributes[attributes.PROMPT_TOKEN_IDS]) for call in calls]
        lengths = [len(call.attributes[attributes.RESPONSE_TOKEN_IDS]) for call in calls]
        numbers.append(len(calls))
        first.append(prompts[0])
        responses += lengths
        whole = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]
        added += [
            max(prompt - before, 0) for before, prompt in zip(whole[:-1], prompts[1:], strict=True)
        ]
        gaps += [
            (after.start_ns - before.end_ns) / 1e9
            for before, after in pairwise(calls)
            if after.start_ns >= before.end_ns
        ]
    return Turns(*map(tuple, (numbers, first, added, responses, gaps)))


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quantiles, the mean and the number of values."""
    values_at = np.quantile(values, PROBABILITIES) if values else []
    named = {f"{p:g}": round(float(q), 6) for p, q in zip(PROBABILITIES, values_at, strict=False)}
    return (
        named
        | ({"mean": round(float(np.mean(values)), 6)} if values else {})
        | {"number": len(values)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    with closing(Store(args.run_dir / "store.sqlite", read_only=True)) as store:
        scored = [r for r in store.rollouts(phase="train") if r.status == "scored"]
        turns = turns_of([store.spans(rollout.rollout_id) for rollout in scored])
    table = {name: quantiles(values) for name, values in vars(turns).items()}
    for name, row in table.items():
        print(f"{name:20s} " + "  ".join(f"{key} {value:g}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
