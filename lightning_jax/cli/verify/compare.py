"""Comparison of stored log-probabilities with recomputed ones, using the trainer's own function."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Float64
from tqdm.auto import tqdm

from lightning_jax.cli.verify.calls import StoredCall
from lightning_jax.cli.verify.report import Comparison, VersionReport
from lightning_jax.cli.verify.weights import WeightsSource
from lightning_jax.models.formats.load import load_model
from lightning_jax.models.lora import adapted
from lightning_jax.models.mesh import batch_sharding, make_mesh, num_row_shards
from lightning_jax.models.policies import ALL, Policy
from lightning_jax.models.shape import chunk_for
from lightning_jax.models.sharding import param_shardings
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.update.logprobs import response_logprobs
from lightning_jax.train.config import Config

SHORTEST_ROW = 64  # tokens; rows are padded to a power of 2 from this on, one compile each
TOKENS_A_BATCH = 2048
HEAD_CHUNK = 64  # response tokens whose logits are in memory at once


def compare_all(
    calls: Sequence[StoredCall],
    config: Config,
    weights_sources: Mapping[Policy, Mapping[int, WeightsSource]],
) -> tuple[VersionReport, ...]:
    """Return one report for each version of each policy with its own weights.

    The trainer's function, dtype and mesh compute the log-probs.
    """
    named, mesh, policies = config.model, make_mesh(config.mesh), config.policy_table
    model = load_model(named.name, named.dtype, named.activation_dtype)
    model = adapted(model, config.model.lora, config.seed, policies.num_adapters)
    shardings = param_shardings(model.config, mesh)
    initial = jax.device_put(model.params, shardings)
    chunk = chunk_for(model.config.shape.vocab_size, HEAD_CHUNK)
    measure = jax.jit(
        partial(response_logprobs, config=model.config, remat="none", head_chunk=chunk)
    )
    by_weights: defaultdict[tuple[int, Policy], list[StoredCall]] = defaultdict(list)
    for call in calls:
        name = call.transition.answered_by
        policy = next((policy for policy in policies.sets if policy.name == name), ALL)
        by_weights[call.version, policy].append(call)
    reports = []
    with tqdm(total=len(calls), desc="calls", unit="call", disable=None) as bar:
        order = sorted(by_weights, key=lambda which: (which[0], which[1].name))
        for version, policy in order:
            group, source = by_weights[version, policy], weights_sources[policy][version]
            params = jax.device_put(source.load(initial), shardings)
            comparisons: list[Comparison] = []
            for some, shape in _batches(group, num_row_shards(mesh)):
                batch = jax.device_put(
                    _batch(some, *shape, policies.adapters), batch_sharding(mesh)
                )
                logprobs = np.asarray(measure(params, batch=batch)[0], np.float64)
                for call, row in zip(some, logprobs, strict=False):  # padding rows follow
                    comparisons += _comparisons(call, row)
                bar.update(len(some))
            reports.append(VersionReport(version, source.label, tuple(comparisons)))
    return tuple(reports)


def _batches(
    calls: Sequence[StoredCall], row_shards: int
) -> Iterator[tuple[list[StoredCall], tuple[int, int]]]:
    """Yield calls of similar length with the (rows, row length) that they are padded to."""
    by_length: defaultdict[int, list[StoredCall]] = defaultdict(list)
    for call in calls:
        length = len(call.transition.prompt_token_ids) + len(call.transition.response_token_ids)
        by_length[max(1 << (length - 1).bit_length(), SHORTEST_ROW)].append(call)
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
    """Build a batch with one call per row and its response tokens as targets.

    `adapters` gives the adapter index of each policy, if there are several.
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
        # With a prompt of 3 tokens, node 2 predicts the first response token.
        ints["target_nodes"][row, :targets] = len(prompt) - 1 + np.arange(targets)
        ints["target_ids"][row, :targets] = response
        mask[row, :targets] = True
        target_calls[row, :targets] = row
        # In the initial weights, which have no policy name, all adapters are equal.
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
    """Yield a comparison of behavior log-probs, and of sampling log-probs if they must be equal."""
    transition = call.transition
    computed = logprobs[: len(transition.response_token_ids)]
    yield Comparison(transition, "behavior", np.asarray(transition.behavior_logprobs), computed)
    if call.is_plain:
        yield Comparison(transition, "sampling", np.asarray(transition.sampling_logprobs), computed)
