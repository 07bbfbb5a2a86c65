"""Checks a run's record: the weights that sampled a token must give it the stored log-probability.

Version s of the weights is what s trainer steps made. Those of 0 (the initial model), of the kept
checkpoints and of the exported policy can be had again; calls of other versions are counted.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float64
from tqdm.auto import tqdm

from lightning_jax.checkpoint import Checkpointer
from lightning_jax.config import Config, ConfigError, load_config
from lightning_jax.models.load import load_model
from lightning_jax.models.lora import adapted, overlay, trained_part
from lightning_jax.models.sharding import (
    batch_sharding,
    make_mesh,
    num_row_shards,
    param_shardings,
)
from lightning_jax.rl.logprobs import response_logprobs
from lightning_jax.rl.train_step import Params
from lightning_jax.store import Store
from lightning_jax.tasks import spread
from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.convert import spans_to_transitions
from lightning_jax.types import Batch, Span, Transition, UserError

# Nats by which an honest log-prob may be off, for sampler and trainer round differently. Of
# SmolLM2-135M on a CPU: up to 3.4e-5 in float32, and up to 0.32, 0.035 on average, in bfloat16.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
SHORTEST_ROW = 64  # tokens; rows are padded to this times a power of two, one compile each
TOKENS_A_BATCH = 2048
HEAD_CHUNK = 64  # response tokens whose logits are in memory at once
NUM_NAMED = 10  # calls that the text names


class VerifyError(UserError, ValueError):
    """There is nothing to compare; the message says why."""


@dataclass(frozen=True)
class StoredCall:
    """One call, and whether it drew from the policy as it is: temperature 1, nothing filtered."""

    transition: Transition
    is_plain: bool

    @property
    def version(self) -> int:
        """Of the weights that made its tokens; they are all of one."""
        return self.transition.policy_versions[0]

    @property
    def row_len(self) -> int:
        """The padded length of prompt and response together."""
        length, call = SHORTEST_ROW, self.transition
        while length < len(call.prompt_token_ids) + len(call.response_token_ids):
            length *= 2
        return length


@dataclass(frozen=True)
class Source:
    """Where one version of the weights can be had."""

    label: str
    load: Callable[[Params], Params]  # what comes out is shaped and placed like what goes in


@dataclass(frozen=True)
class Comparison:
    """One call's stored log-probs and those computed anew, in nats."""

    call: Transition
    kind: Literal["behavior", "sampling"]
    stored: Float64[np.ndarray, " T"]
    computed: Float64[np.ndarray, " T"]

    @property
    def differences(self) -> Float64[np.ndarray, " T"]:
        """Absolute ones, infinite where either number is none."""
        return np.nan_to_num(np.abs(self.stored - self.computed), nan=np.inf)


@dataclass(frozen=True)
class VersionReport:
    """What came of the compared calls of one weights version."""

    version: int
    weights: str  # where they came from
    comparisons: tuple[Comparison, ...]

    def differences(self, kind: str) -> Float64[np.ndarray, " T"]:
        """Absolute ones of all tokens, in nats."""
        found = [each.differences for each in self.comparisons if each.kind == kind]
        return np.concatenate(found) if found else np.zeros(0)


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    tolerance: float  # nats
    versions: tuple[VersionReport, ...]
    not_compared: Mapping[str, int]  # calls by reason

    @property
    def off(self) -> list[Comparison]:
        """The comparisons with a token beyond the tolerance, worst first."""
        found = [each for version in self.versions for each in version.comparisons]
        off = [each for each in found if each.differences.max() > self.tolerance]
        return sorted(off, key=lambda each: -each.differences.max())


def verify(run_dir: Path, *, limit: int | None = None, tolerance: float | None = None) -> Report:
    """Compares the run's stored calls, at most `limit`, with what their weights say.

    Raises UserError where this is no run directory, or no call's weights can be had.
    """
    for name in ("config.yaml", "store.sqlite"):
        if not (run_dir / name).is_file():
            raise ConfigError(
                f"{run_dir} has no {name}; expected the directory of a training run. "
                "Check the path."
            )
    config = load_config(Config, [str(run_dir / "config.yaml")])
    with contextlib.closing(Store(run_dir / "store.sqlite")) as store:
        calls, not_compared = _stored_calls(store)
        last_version = max((version.version for version in store.versions()), default=0)
    sources = _sources(run_dir, config, last_version)
    calls, reasons = _with_known_weights(calls, sources)
    not_compared |= reasons
    if not calls:
        counted = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in reasons.items())
        raise VerifyError(
            f"{run_dir} has no call that can be compared ({counted or 'none is stored'}); expected "
            f"calls of the weights versions {sorted(sources)}. Raise checkpoint.keep in later runs."
        )
    chosen = calls if limit is None else spread(calls, limit)
    if len(chosen) < len(calls):
        not_compared["beyond_the_limit"] = len(calls) - len(chosen)
    versions = _compare_all(chosen, config, sources)
    return Report(
        tolerance=TOLERANCE[config.model.dtype] if tolerance is None else tolerance,
        versions=versions,
        not_compared=not_compared,
    )


def as_text(report: Report) -> str:
    """The report as a table, then the calls that are off."""
    columns = ("version", "calls", "tokens", "max diff", "mean diff", "share off", "sampling max")
    lines = [" ".join(f"{name:>12}" for name in columns) + "  weights"]
    for found in report.versions:
        behavior, sampling = found.differences("behavior"), found.differences("sampling")
        cells = (
            found.version,
            sum(each.kind == "behavior" for each in found.comparisons),
            behavior.size,
            f"{behavior.max():.2e}",
            f"{behavior.mean():.2e}",
            f"{(behavior > report.tolerance).mean():.3%}",
            f"{sampling.max():.2e}" if sampling.size else "-",
        )
        lines.append(" ".join(f"{cell!s:>12}" for cell in cells) + f"  {found.weights}")
    for reason, count in sorted(report.not_compared.items()):
        lines.append(f"not compared: {count} calls, {reason.replace('_', ' ')}")
    lines += [_sentence(each) for each in report.off[:NUM_NAMED]]
    if len(report.off) > NUM_NAMED:
        lines.append(f"and {len(report.off) - NUM_NAMED} more are off")
    num_off = len({each.call.call_id for each in report.off})
    num_calls = sum(each.kind == "behavior" for v in report.versions for each in v.comparisons)
    if num_off:
        verdict = f"off by more than {report.tolerance:g} nats: {num_off} of {num_calls} calls"
    else:
        verdict = f"all {num_calls} calls are within {report.tolerance:g} nats"
    lines.append(verdict)
    return "\n".join(lines)


def _sentence(off: Comparison) -> str:
    token = int(off.differences.argmax())
    rollout = f"rollout {off.call.rollout_id}" if off.call.rollout_id else "no rollout"
    return (
        f"off: call {off.call.call_id} of {rollout}, {off.kind} log-prob of response token "
        f"{token}: stored {off.stored[token]:.6f}, computed {off.computed[token]:.6f}"
    )


# The calls


def _stored_calls(store: Store) -> tuple[list[StoredCall], dict[str, int]]:
    """The calls that hold tokens, by rollout; and how many do not, by reason."""
    calls: list[StoredCall] = []
    left_out: Counter[str] = Counter()
    for rollout_id in (*(rollout.rollout_id for rollout in store.rollouts()), None):
        spans = store.spans(rollout_id)
        transitions, reasons = spans_to_transitions(spans)
        left_out.update(reasons)
        by_id = {span.span_id: span for span in spans}
        calls += [StoredCall(call, _is_plain(call.call_id, by_id)) for call in transitions]
    return calls, dict(left_out)


def _is_plain(call_id: str, spans: Mapping[str, Span]) -> bool:
    """Whether tokens were drawn from the policy's own distribution.

    The span of one of several choices leaves it to its parent to say.
    """
    span = spans[call_id]
    if names.CHOICE_INDEX in span.attributes:
        span = spans.get(span.parent_span_id or "", span)
    plain = {
        names.REQUEST_TEMPERATURE: 1,
        names.REQUEST_TOP_P: 1,
        names.REQUEST_TOP_K: 0,
        names.REQUEST_MIN_P: 0,
    }
    values = span.attributes
    same = all(values.get(name) == value for name, value in plain.items())
    return same and not values.get(names.ADJUSTED)


def _with_known_weights(
    calls: Sequence[StoredCall], sources: Mapping[int, Source]
) -> tuple[list[StoredCall], dict[str, int]]:
    """The calls whose weights can be had; and how many others there are, by reason.

    The cache of a call during which the weights changed held keys of several versions, so no one
    version gives its numbers.
    """
    kept: list[StoredCall] = []
    reasons: Counter[str] = Counter()
    for call in calls:
        used = set(call.transition.policy_versions)
        if not used <= sources.keys():
            reasons["weights_not_kept"] += 1
        elif len(used) > 1:
            reasons["weights_changed_during_the_call"] += 1
        else:
            kept.append(call)
    return kept, dict(reasons)


# The weights


def _sources(run_dir: Path, config: Config, last_version: int) -> dict[int, Source]:
    """The versions that the run directory still holds; what they load from is given version 0."""
    sources = {0: Source(config.model.name, lambda initial: initial)}
    # An exported policy does not say its version. It is the last one's if the run is at its end.
    # Of several policies each is merged apart: no one set of weights is all of them.
    whole = not config.policies and (run_dir / "policy").is_dir()
    if last_version == config.total_steps > 0 and whole:
        sources[last_version] = Source(
            # Adapters are merged there, and those over it are zero.
            "policy",
            lambda initial: overlay(
                initial, load_model(str(run_dir / "policy"), config.model.dtype).params
            ),
        )
    directory = run_dir / "checkpoints"
    if directory.is_dir():

        def restore(initial: Params, step: int) -> Params:
            with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
                trained = checkpointer.restore_params(trained_part(initial), step)
                return overlay(initial, trained)

        with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
            for step in checkpointer.steps:
                sources[step] = Source(f"checkpoints/{step}", partial(restore, step=step))
    return sources


# The comparison


def _compare_all(
    calls: Sequence[StoredCall], config: Config, sources: Mapping[int, Source]
) -> tuple[VersionReport, ...]:
    """One report a version. The numbers are the trainer's: its own function, dtype and mesh."""
    model, mesh = load_model(config.model.name, config.model.dtype), make_mesh(config.mesh)
    model = adapted(model, config.model.lora, config.seed, config.num_adapters)
    shardings = param_shardings(model.config, mesh)
    initial = jax.device_put(model.params, shardings)
    measure = jax.jit(
        partial(response_logprobs, config=model.config, remat=False, head_chunk=HEAD_CHUNK)
    )
    by_version: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        by_version[call.version].append(call)
    reports = []
    with tqdm(total=len(calls), desc="calls", unit="call", disable=None) as bar:
        for version, group in sorted(by_version.items()):
            params = jax.device_put(sources[version].load(initial), shardings)
            comparisons: list[Comparison] = []
            for some, shape in _batches(group, num_row_shards(mesh)):
                batch = jax.device_put(_batch(some, *shape, config.adapters), batch_sharding(mesh))
                logprobs = np.asarray(measure(params, batch=batch)[0], np.float64)
                for call, row in zip(some, logprobs, strict=False):  # rows of padding follow
                    comparisons += _comparisons(call, row)
                bar.update(len(some))
            reports.append(VersionReport(version, sources[version].label, tuple(comparisons)))
    return tuple(reports)


def _batches(
    calls: Sequence[StoredCall], row_shards: int
) -> Iterator[tuple[list[StoredCall], tuple[int, int]]]:
    """Calls of about one length, and the (rows, row length) that they are padded to."""
    by_length: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        by_length[call.row_len].append(call)
    for row_len, group in sorted(by_length.items()):
        num_rows = row_shards * max(1, TOKENS_A_BATCH // (row_len * row_shards))
        for start in range(0, len(group), num_rows):
            yield group[start : start + num_rows], (num_rows, row_len)


def _batch(
    calls: Sequence[StoredCall],
    num_rows: int,
    row_len: int,
    adapters: Mapping[str, int] | None = None,
) -> Batch:
    """One call a row, each of its response tokens a target. `adapters` are those of several
    policies.
    """
    shape = (num_rows, row_len)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "target_nodes", "target_ids")}
    positions = np.tile(np.arange(row_len, dtype=np.int32), (num_rows, 1))
    ends, mask, nothing = positions + 1, np.zeros(shape, bool), np.zeros(shape, np.float32)
    target_calls = np.full(shape, -1, np.int32)
    chosen = np.zeros(num_rows, np.int32)
    for row, call in enumerate(calls):
        prompt, response = call.transition.prompt_token_ids, call.transition.response_token_ids
        length, targets = len(prompt) + len(response), len(response)
        ints["tokens"][row, :length] = prompt + response
        ends[row, :length] = length
        # With a prompt of 3 tokens, node 2 gives the first response token.
        ints["target_nodes"][row, :targets] = len(prompt) - 1 + np.arange(targets)
        ints["target_ids"][row, :targets] = response
        mask[row, :targets] = True
        target_calls[row, :targets] = row
        # Initial weights answered for no policy; there all adapters are alike.
        chosen[row] = (adapters or {}).get(call.transition.answered_by, 0)
    return Batch(
        **ints,
        positions=positions,
        ends=ends,
        target_mask=mask,
        target_calls=target_calls,
        behavior_logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        adapters=chosen if adapters else None,
    )


def _comparisons(call: StoredCall, logprobs: Float64[np.ndarray, " T"]) -> Iterator[Comparison]:
    """Of the call's behaviour log-probs, and of those it was drawn with where they are the same."""
    transition = call.transition
    computed = logprobs[: len(transition.response_token_ids)]
    yield Comparison(transition, "behavior", np.asarray(transition.behavior_logprobs), computed)
    if call.is_plain:
        yield Comparison(transition, "sampling", np.asarray(transition.sampling_logprobs), computed)
