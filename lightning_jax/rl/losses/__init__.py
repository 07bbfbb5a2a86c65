"""Losses of a token and off-policy corrections, made by constructors."""

from lightning_jax.rl.losses.ratios import mask as mask
from lightning_jax.rl.losses.ratios import truncate as truncate
from lightning_jax.rl.losses.surrogates import LossInputs as LossInputs
from lightning_jax.rl.losses.surrogates import TokenLoss as TokenLoss
from lightning_jax.rl.losses.surrogates import cispo as cispo
from lightning_jax.rl.losses.surrogates import clip as clip
from lightning_jax.rl.losses.surrogates import gspo as gspo
from lightning_jax.rl.losses.surrogates import reinforce as reinforce
