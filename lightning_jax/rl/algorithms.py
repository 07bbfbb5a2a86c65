"""Combinations of settings that papers have given a name to.

Each function returns an `AlgorithmConfig` and accepts any of its fields as an override. The table
of docs/algorithms.md is `table()`.
"""

import dataclasses
import re
from typing import Any

from lightning_jax.rl.config import AlgorithmConfig


def grpo_by_rollout(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of GRPO by rollout, the default (arXiv 2402.03300)."""
    return AlgorithmConfig(**overrides)


def grpo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of GRPO (arXiv 2402.03300)."""
    return _with(overrides, aggregation="call", kl_coef=0.04)


def ppo_clip(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of PPO's clipped loss (arXiv 1707.06347)."""
    return _with(overrides, num_epochs=4)


def dr_grpo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of Dr. GRPO (arXiv 2503.20783)."""
    return _with(overrides, normalize="none", aggregation="constant")


def dapo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of DAPO (arXiv 2503.14476)."""
    return _with(
        overrides, clip_high=0.28, aggregation="token", max_sampling_rounds=3, overlong_penalty=1.0
    )


def gspo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of GSPO (arXiv 2507.18071)."""
    settings = {"loss": "gspo", "aggregation": "call", "clip_low": 3e-4, "clip_high": 4e-4}
    return _with(overrides, **settings, proximal="old", correction="truncate")


def cispo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of CISPO (arXiv 2506.13585, 2510.13786)."""
    return _with(overrides, loss="cispo", aggregation="token", clip_low=1.0, clip_high=4.0)


def rloo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of RLOO (arXiv 2402.14740)."""
    settings = {"normalize": "none", "aggregation": "constant", "token_divisor": 1.0}
    return _with(overrides, **settings, loss="reinforce", baseline="leave_one_out")


def reinforce(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of REINFORCE (Williams 1992)."""
    settings = {"normalize": "none", "aggregation": "constant", "token_divisor": 1.0}
    return _with(overrides, **settings, loss="reinforce", baseline="none")


def reinforce_plus_plus(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of REINFORCE++ (arXiv 2501.03262)."""
    settings = {"baseline": "batch_mean", "normalize": "batch_std", "aggregation": "token"}
    return _with(overrides, **settings, kl_coef=0.01, kl_estimator="k1", kl_in="reward")


def reinforce_plus_plus_baseline(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of REINFORCE++ with baseline (arXiv 2501.03262)."""
    settings = {"normalize": "batch_std", "aggregation": "token"}
    return _with(overrides, **settings, kl_coef=0.01, kl_estimator="k2")


def decoupled_ppo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of decoupled PPO (arXiv 2110.00641)."""
    return _with(overrides, proximal="old", correction="truncate")


def ppo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of PPO, a value per token (arXiv 1707.06347, 1506.02438)."""
    settings = {"credit": "learned_token", "gae_lambda": 0.95, "value_clip": 0.2, "num_epochs": 4}
    return _with(overrides, **settings, baseline="none", normalize="none", aggregation="token")


def value_per_call(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of a value per call (arXiv 1506.02438)."""
    return _with(overrides, credit="learned", baseline="none", normalize="none")


def turn_groups(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of turn-level groups (cf. 2505.11821)."""
    return _with(overrides, credit="turn_groups")


def raft(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of RAFT, best of group (arXiv 2304.06767)."""
    return _with(overrides, loss="raft")


def dpo(**overrides: Any) -> AlgorithmConfig:
    """Return the settings of DPO (arXiv 2305.18290)."""
    return _with(overrides, loss="dpo")


ALGORITHMS = (
    grpo_by_rollout, grpo, ppo_clip, dr_grpo, dapo, gspo, cispo, rloo, reinforce,
    reinforce_plus_plus, reinforce_plus_plus_baseline, decoupled_ppo, ppo, value_per_call,
    turn_groups, raft, dpo,
)  # fmt: skip


def changed_settings(algorithm: AlgorithmConfig) -> list[str]:
    """Return `name=value` for each setting that is not the default."""
    values = ((f, getattr(algorithm, f.name)) for f in dataclasses.fields(algorithm))
    return [
        f"{f.name}={f'{value:g}' if isinstance(value, float) else value}"
        for f, value in values
        if value != f.default
    ]


def table() -> str:
    """Render the algorithms as a Markdown table, with names and papers from their docstrings."""
    rows = ["| algorithm | paper (arXiv) | `lj.algorithms` | settings of `algorithm.*` |"]
    rows.append("|---|---|---|---|")
    for function in ALGORITHMS:
        match = re.fullmatch(
            r"Return the settings of (.+) \((?:arXiv )?(.+)\)\.", function.__doc__ or ""
        )
        assert match, f"{function.__name__} needs a docstring with a name and a paper"
        settings = " ".join(changed_settings(function()))
        code = f"`{settings}` " if settings else ""
        rows.append(f"| {match[1]} | {match[2]} | `{function.__name__}()` | {code}|")
    return "\n".join(rows)


def _with(overrides: dict[str, Any], **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**settings | overrides)
