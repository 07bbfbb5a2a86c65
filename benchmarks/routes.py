"""Count the experts that a model chooses differently in training and in sampling.

    python benchmarks/routes.py                            # a random model of 152M weights
    python benchmarks/routes.py DIR --tokens 128           # a model, with random tokens

Each row is a dtype. A sequence is read once as a row of the forest, and once as sampling reads it:
all but the last tokens are prefilled into the cache, and those are decoded one by one.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.models.formats.load import load_model
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Experts
from lightning_jax.models.transformer import init_params
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.update.routes import FLIPS, make_probe
from lightning_jax.testing.records import sequence

LAYERS = 8
RANDOM = DecoderConfig(
    DecoderShape(
        vocab_size=4096,
        embed_dim=512,
        blocks=LAYERS * (Block(Attention(8, 2, 64, qk_norm="head"), Experts(32, 4, 384)),),
    )
)
DTYPES = (("float32", None), ("bfloat16", "float32"), ("bfloat16", None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="directory; by default a random model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--decoded", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    if options.model:
        loaded = load_model(options.model)
        config, params = loaded.config, loaded.params
    else:
        config, params = RANDOM, init_params(RANDOM, jax.random.key(0))
    number, layers = options.tokens, config.shape.num_layers
    batch_config = BatchConfig(rows=1, row_len=number, max_targets=number, head_chunk=1)
    for dtype, activations in DTYPES:
        probe = make_probe(
            config.with_execution(activation_dtype=activations),
            jax.default_backend(),
            compute_dtype=jnp.dtype(dtype),
            num_decoded=options.decoded,
        )
        flips = []
        for seed in range(options.seeds):
            rng = np.random.default_rng(seed)
            ids = rng.integers(0, config.shape.vocab_size, number).tolist()
            (batch,), _ = make_batches([sequence(ids[:-8], ids[-8:])], batch_config)
            flips.append(probe.measure(params, jax.tree.map(jnp.asarray, batch), batch)[FLIPS])
        name = dtype + (f" with {activations} activations" if activations else "")
        mean = float(np.mean(flips))
        sys.stdout.write(f"{name}: {mean:.4f} of {layers} routers per token\n")


if __name__ == "__main__":
    main()
