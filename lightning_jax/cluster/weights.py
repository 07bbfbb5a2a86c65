"""Weights on the host, on their way through Ray's object store.

Ray keeps the bytes of an array that pickle takes out of band, and gives them to all processes of a
machine without a copy. NumPy does this for its own dtypes only, so bfloat16 travels as uint16.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.models.formats.param_names import Path, flatten, unflatten
from lightning_jax.models.sharding import to_host
from lightning_jax.models.transformer import Params

Sent = dict[Path, tuple[str, np.ndarray]]  # name of the dtype, and the array

_cast = jax.jit(lambda leaf, dtype: leaf.astype(dtype), static_argnums=1)


def on_host(params: Params, dtype: str) -> Sent:
    """Copy the weights in `dtype` to the host, array by array. Cast on the devices.

    If they span several processes, all of them must call this.
    """
    wanted = jnp.dtype(dtype)
    sent: Sent = {}
    for path, leaf in flatten(params).items():
        found = np.asarray(to_host(_cast(leaf, wanted)))
        sent[path] = str(wanted), found.view(np.uint16) if wanted == jnp.bfloat16 else found
    return sent


def received(*sent: Sent) -> Params:
    """Return the tree of the weights, in which later arrays replace earlier ones.

    It shares their memory.
    """
    merged = {path: array for part in sent for path, array in part.items()}
    return unflatten({path: array.view(jnp.dtype(name)) for path, (name, array) in merged.items()})


def copied(sent: Sent) -> Sent:
    """Return a copy, for weights whose arrays may be donated."""
    return {path: (dtype, array.copy()) for path, (dtype, array) in sent.items()}
