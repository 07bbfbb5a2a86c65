"""Plain torch loop of forward, backward and AdamW. See ../updates.py for the command line.

Calls of equal lengths form one batch and others run one by one, so nothing is padded. Logits are
computed only at response tokens, or at every token with `--logits all`, like `model(input_ids)`.
"""

# pyright: reportMissingImports=false
# transformers is in a separate environment.

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from updates import LEARNING_RATE, MAX_GRAD_NORM, Call, Clock, Result, main, num_tokens
from workloads import THREADS


def lengths(call: Call) -> tuple[int, int]:
    return len(call.prompt), len(call.response)


def loss_sum(model: Any, calls: Sequence[Call], *, all_logits: bool) -> torch.Tensor:
    """Return -advantage * log-probability, summed over the responses of calls of equal lengths."""
    ids = torch.tensor([call.prompt + call.response for call in calls])
    size = len(calls[0].response)
    kept = 0 if all_logits else size + 1
    logits = model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits
    logits = logits[:, -size - 1 : -1].float()
    logprobs = -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids[:, -size:], reduction="none"
    )
    advantages = torch.tensor([[call.advantage] for call in calls])
    return -(advantages * logprobs).sum()


def measure(args: argparse.Namespace, calls: Sequence[Call]) -> Result:
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    ordered = sorted(calls, key=lengths)
    batches = [list(batch) for _, batch in itertools.groupby(ordered, key=lengths)]
    num_targets = sum(len(call.response) for call in calls)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16")
    clock, norms = Clock(), []
    for _ in range(1 + args.steps):
        clock.start()
        for batch in batches:
            with autocast:
                loss = loss_sum(model, batch, all_logits=args.logits == "all") / num_targets
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
        clock.stop()
    return clock.result(grad_norm=norms[0], computed=num_tokens(calls))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--logits", choices=("responses", "all"), default="responses")


if __name__ == "__main__":
    main(measure, ("torch", "transformers"), add_arguments)
