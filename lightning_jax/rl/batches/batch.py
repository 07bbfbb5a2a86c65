"""Records of packed training data: batches and their targets, on a host or device."""

from dataclasses import dataclass, field

import jax

from lightning_jax.types import Leaf

NO_TOKEN = -1e9  # log-probability of a entry without a token, if a teacher named fewer than K


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBatch:
    """States of a batch that a critic learns from, at most one per target and at its index."""

    nodes: Leaf  # int32 [B, R], row index of the last node in the state's context
    values: Leaf  # float32 [B, R], of the critic before the step's first update
    returns: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where there is no state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopTokens:
    """Tokens that a teacher finds likeliest after a node, at the index of the distinct target."""

    ids: Leaf  # int32 [B, R, K]
    # float32 [B, R, K], at the temperature of the call; `NO_TOKEN` where there are
    # fewer than K
    logprobs: Leaf
    kl: str = field(metadata={"static": True})  # forward or reverse; see losses/surrogates.py


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherBatch:
    """Scores of a batch's targets by a teacher, at the index of the target."""

    logprobs: Leaf  # float32 [B, R], of the sampled token, at the temperature of the call
    coefs: Leaf  # float32 [B, R], weight of the teacher; 0 where it scored nothing
    top: Leaf = None  # TopTokens; None: only the sampled tokens were scored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskBatch:
    """Tokens that grammars allowed at a row's pairs. Pairs with different masks are distinct."""

    table: Leaf  # uint8 [B, M, V/8], masks of the row, 8 tokens a byte, lowest bit first
    of_pairs: Leaf  # int32 [B, R], index of each pair's mask; 0 allows everything


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistinctTargets:
    """Distinct (node, token) pairs among a row's targets, for which the LM head is evaluated.

    Siblings that sampled the same token after the same path have one target each, but share the
    pair.
    """

    nodes: Leaf  # int32 [B, R], row index of the node that predicts
    ids: Leaf  # int32 [B, R], the token; -1 if there is no pair
    of_targets: Leaf  # int32 [B, R], index of each target's pair
    # float32 [B, R], divisor of a pair's logits. Pairs with different divisors are distinct.
    # None: all are 1.
    temperatures: Leaf = None
    masks: Leaf = None  # MaskBatch of the pairs; None: no grammar masked a target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Forest of token tries in fixed shapes: B rows of T nodes, and R targets per row.

    Nodes are in depth-first order. Node i sees node j iff `j <= i < ends[j]`. `positions` is the
    depth in the tree. Padding nodes see only themselves.

    A target is one sampled token: after the path to `target_nodes`, the model sampled `target_ids`.
    Two transitions that sampled the same token after the same path share the node, never the
    target. The targets of one sequence are adjacent in one row, in order.
    """

    tokens: Leaf  # int32 [B, T]
    positions: Leaf  # int32 [B, T]
    ends: Leaf  # int32 [B, T]
    target_nodes: Leaf  # int32 [B, R], row index of the node that predicts
    target_ids: Leaf  # int32 [B, R]
    target_mask: Leaf  # bool [B, R], True = a sampled token
    target_calls: Leaf  # int32 [B, R], index of the target's sequence; -1 where masked
    behavior_logprobs: Leaf  # float32 [B, R]
    advantages: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where masked
    # float32 [B, R], of the trainer before the step's first update. None: this is the first.
    old_logprobs: Leaf = None
    states: Leaf = None  # StateBatch, or None without a critic
    adapters: Leaf = None  # int32 [B], adapter index of each row; None: at most one adapter
    distinct: Leaf = None  # DistinctTargets; None: evaluate the LM head per target
    teacher: Leaf = None  # TeacherBatch; None: no teacher scored a target
