"""Joint update of several policies, which are adapters stacked along the first axis of every array.

With separate updates each policy has its own gradient-norm clip and its own AdamW state and update
count. A policy is skipped alone if its gradient is not finite or the update has no targets for it.
The result is the same as if it were trained alone. Otherwise all policies share one norm, one
state and one skip.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from lightning_jax.rl.batches.batch import Batch


@dataclass(frozen=True)
class AdapterPolicies:
    """Policies of a run, in the order of their adapters."""

    names: tuple[str, ...]
    trained: tuple[bool, ...]  # False: no update changes it
    separate: bool = True  # False: one shared update

    @property
    def number(self) -> int:
        return len(self.names)

    @property
    def indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def vmap_optimizer(optimizer: optax.GradientTransformation, number: int) -> Any:
    """Build an optimizer that updates each of `number` entries along the first axis separately."""

    def init(params: Any) -> Any:
        # vmap is not used here, because its new arrays would not have the params' sharding.
        return jax.tree.map(
            lambda leaf: jnp.full(number, leaf) if getattr(leaf, "ndim", None) == 0 else leaf,
            optimizer.init(params),
        )

    return optax.GradientTransformation(init, jax.vmap(optimizer.update))


def norms(tree: Any, number: int) -> Float[Array, " N"]:
    """Return the norm of each of the `number` entries along the first axis of all arrays."""
    squares = [jnp.square(leaf.reshape(number, -1)).sum(axis=1) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(number)))


def select(mask: Bool[Array, " N"], new: Any, old: Any) -> Any:
    """Select new array entries along the first axis if `mask` is True, otherwise old ones.

    Scalars are shared by all entries, and new if any entry is new.
    """

    def one(new: Array, old: Array) -> Array:
        if new.ndim == 0:
            return jnp.where(mask.any(), new, old)
        return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def find_valid_updates(
    policies: AdapterPolicies, grads: tuple[Any, Any], present: Bool[Array, " N"]
) -> tuple[Bool[Array, " N"], dict[str, Float[Array, ""]]]:
    """Return (mask of policies whose update is kept, metrics).

    `grads` are the gradients of the weights and of the value head.
    """
    number = policies.number
    weight_norms, head_norms = norms(grads[0], number), jnp.zeros(number)
    if grads[1] is not None and grads[1].kernel.ndim == 2:
        head_norms = norms(grads[1], number)
    finite = jnp.isfinite(weight_norms) & jnp.isfinite(head_norms)
    if not policies.separate:
        finite = jnp.broadcast_to(jnp.isfinite(optax.tree.norm(grads)), (number,))
    lost = (present & ~finite).astype(jnp.float32)
    metrics = {}
    for index, name in enumerate(policies.names):
        metrics[f"train/grad_norm/policy={name}"] = weight_norms[index]
        metrics[f"train/skipped_updates/policy={name}"] = lost[index]
    return finite & present, metrics


def find_trained_policies(
    policies: AdapterPolicies, batches: Sequence[Batch]
) -> Bool[np.ndarray, " N"]:
    """Return a mask of the policies that an update over these host batches may change."""
    if not policies.separate:
        return np.asarray(policies.trained)
    has_targets = np.zeros(policies.number, bool)
    for batch in batches:
        has_targets[batch.adapters[batch.target_mask.any(axis=1)]] = True
    return has_targets & np.asarray(policies.trained)
