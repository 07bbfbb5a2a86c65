"""An update of several policies at once: adapters on one base, stacked along the first axis of
every array that is trained.

With separate updates each of them has its own clip of the gradient's norm, its own AdamW state with
its own count of updates, and is skipped by itself where its gradient is not finite or an update has
nothing for it. So it ends where it would have ended alone. Else one norm, one state and one skip
are those of all together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from lightning_jax.config import Config
from lightning_jax.types import Batch


@dataclass(frozen=True)
class Several:
    """The policies of a run, in the order of their adapters."""

    names: tuple[str, ...]
    trained: tuple[bool, ...]  # False: no update changes it
    separate: bool = True  # False: one update of all

    @property
    def number(self) -> int:
        return len(self.names)


def several_of(config: Config, *, supervised: bool) -> Several | None:
    """Those of a run, None where no policies are adapters. A warm-up trains all of them, each
    apart.
    """
    if not config.adapters:
        return None
    trained = tuple(supervised or policy.trains for policy in config.policies.values())
    separate = supervised or config.algorithm.policy_updates == "independent"
    return Several(tuple(config.policies), trained, separate)


def separately(optimizer: optax.GradientTransformation, number: int) -> Any:
    """The optimizer, once for each of the `number` entries along the first axis of all arrays."""

    def init(params: Any) -> Any:
        # Not by vmap, under which new arrays do not lie where the params do.
        return jax.tree.map(
            lambda leaf: jnp.full(number, leaf) if getattr(leaf, "ndim", None) == 0 else leaf,
            optimizer.init(params),
        )

    return optax.GradientTransformation(init, jax.vmap(optimizer.update))


def norms(tree: Any, number: int) -> Float[Array, " N"]:
    """The norm of each of the `number` entries along the first axis of all arrays."""
    squares = [jnp.square(leaf.reshape(number, -1)).sum(axis=1) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(number)))


def choose(which: Bool[Array, " N"], new: Any, old: Any) -> Any:
    """The new arrays where `which` is True along their first axis, else the old ones; scalars are
    those of all together, and new where any entry is.
    """

    def one(new: Array, old: Array) -> Array:
        if new.ndim == 0:
            return jnp.where(which.any(), new, old)
        return jnp.where(which.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def kept_updates(
    several: Several, grads: tuple[Any, Any], present: Bool[Array, " N"]
) -> tuple[Bool[Array, " N"], dict[str, Float[Array, ""]]]:
    """(whose update counts, metrics), by the gradients of the weights and of the value head."""
    number = several.number
    own, of_heads = norms(grads[0], number), jnp.zeros(number)
    if grads[1] is not None and grads[1].kernel.ndim == 2:
        of_heads = norms(grads[1], number)
    finite = jnp.isfinite(own) & jnp.isfinite(of_heads)
    if not several.separate:
        finite = jnp.broadcast_to(jnp.isfinite(optax.tree.norm(grads)), (number,))
    lost = (present & ~finite).astype(jnp.float32)
    metrics = {}
    for place, name in enumerate(several.names):
        metrics[f"train/grad_norm/policy={name}"] = own[place]
        metrics[f"train/skipped_updates/policy={name}"] = lost[place]
    return finite & present, metrics


def taking_part(several: Several, batches: Sequence[Batch]) -> Bool[np.ndarray, " N"]:
    """Which policies an update over these batches, still on the host, may change."""
    if not several.separate:
        return np.asarray(several.trained)
    found = np.zeros(several.number, bool)
    for batch in batches:
        found[batch.adapters[batch.target_mask.any(axis=1)]] = True
    return found & np.asarray(several.trained)
