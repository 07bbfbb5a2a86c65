"""AdamW and its learning-rate schedule, built from the configuration."""

import jax
import jax.numpy as jnp
import optax

from lightning_jax.rl.config import OptimizerConfig


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Build the learning-rate schedule: linear warm-up, then constant or a cosine decay to a tenth.

    With `warmup_steps` n, update i < n runs at (i + 1) / (n + 1) of the rate. No update is wasted
    at rate 0.
    """
    top = config.learning_rate
    rise = optax.linear_schedule(top / (config.warmup_steps + 1), top, max(config.warmup_steps, 1))
    if config.decay_steps is None:
        after = optax.constant_schedule(top)
    else:
        after = optax.cosine_decay_schedule(top, config.decay_steps, alpha=0.1)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build AdamW after a clip of the gradient norm. Only matrices decay, not norms or biases.

    Second moments are float32 for any `mu_dtype`. With 8 bits of precision, a running mean over
    1 / (1 - b2) updates would stop moving.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            mu_dtype=config.mu_dtype,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params),
        ),
    )
