"""Rules between the settings of several sections of a run."""

from collections.abc import Iterator, Mapping

from lightning_jax.models.config import ModelConfig, PolicyConfig
from lightning_jax.rl.config import GROUP_BASELINES, AlgorithmConfig
from lightning_jax.rollouts.config import NAME, AgentConfig, RolloutConfig
from lightning_jax.settings.schema import Rule
from lightning_jax.traces.config import RESERVED, RoleConfig


def policy_rules(
    policies: Mapping[str, PolicyConfig],
    roles: Mapping[str, RoleConfig],
    model: ModelConfig,
    algorithm: AlgorithmConfig,
) -> Iterator[Rule]:
    """Return what policies need, by themselves and from roles.

    A policy without a role is refused only if some role names a policy. Otherwise agents reach
    policies by asking for them as their model. This catches a typo like
    `policies.writter.trains=false`, which makes a policy that is never called.
    """
    names = ", ".join(policies)
    for name, policy in policies.items():
        yield (
            f"policies.{name}",
            name not in RESERVED and NAME.fullmatch(name),
            f"has no usable name; expected letters, digits, - and _, and none of "
            f"{', '.join(RESERVED)}: agents ask for it as their model",
            "invalid",
        )
        yield (
            f"policies.{name}.base",
            not model.lora.rank or policy.base in (None, model.name),
            f"is {policy.base!r}; expected none or {model.name!r}, as with model.lora.rank above 0 "
            "all policies are adapters on model.name",
        )
    learns = not policies or any(policy.trains for policy in policies.values())
    text = f"names {names}, and trains is false for all; set trains: true for at least one"
    yield "policies", learns, text
    yield (
        "algorithm.value_heads",
        not policies or model.lora.rank or algorithm.value_heads != "shared",
        f"is 'shared' and {names} have weights of their own, as model.lora.rank is 0; expected "
        "per_policy, because the states of different weights have nothing in common that one head "
        "could read",
    )
    for name, role in roles.items():
        yield (
            f"roles.{name}.policy",
            role.policy is None or role.policy in policies,
            f"is {role.policy!r}; expected "
            f"{f'one of {names}' if policies else 'none without a section policies'}",
            "unknown",
        )
    named = {role.policy for role in roles.values() if role.policy is not None}
    for name in policies:
        yield (
            f"policies.{name}",
            not named or name in named,
            f"has no role, although roles name {', '.join(sorted(named))}; correct its name, or, "
            f"if agents request it as their model, add roles.{name}={{model: {name}, "
            f"policy: {name}}}",
            "unused",
        )


CORRECTED = "algorithm.proximal=old algorithm.correction=truncate algorithm.correction_high=2"


def age_rules(
    agent: AgentConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> Iterator[Rule]:
    """Return what training on samples of older weights needs, and on groups from outside."""
    most, cause = rollout.tasks_per_step * algorithm.max_staleness, "agent.external is true"
    if agent.external:
        text = f"is {rollout.ahead} and {cause}, so programs outside decide when rollouts run; set "
        yield "rollout.ahead", not rollout.ahead, f"{text}it to 0"
        for name, fix, in_group in (
            ("baseline", "batch_mean", GROUP_BASELINES),
            ("normalize", "batch_std", ("group_std",)),
        ):
            value = getattr(algorithm, name)
            yield (
                f"algorithm.{name}",
                rollout.group_size > 1 or value not in in_group,
                f"is {value}, which compares the rollouts of a group, and rollout.group_size is 1, "
                f"so nothing would be learned; set it to {fix}",
            )
        text = f"is 0 and {cause}, so rollouts run while the trainer works; set it to at least 1"
        yield "algorithm.max_staleness", algorithm.max_staleness, text, "out_of_range"
    elif rollout.ahead:
        cause = f"rollout.ahead is {rollout.ahead}"
        yield (
            "rollout.ahead",
            rollout.ahead <= most,
            f"is {rollout.ahead}; expected at most {most}, which is "
            f"rollout.tasks_per_step={rollout.tasks_per_step} times "
            f"algorithm.max_staleness={algorithm.max_staleness}, or samples would be dropped for "
            "their age",
            "out_of_range",
        )
    else:
        return
    if algorithm.loss != "dpo":  # compares pairs, without a ratio to the behavior policy
        yield (
            "algorithm.correction",
            algorithm.correction != "none",
            f"is none and {cause}, which trains on samples of older weights; set {CORRECTED}",
        )
        yield (
            "algorithm.clip_dual",
            algorithm.loss not in ("clip", "gspo") or algorithm.clip_dual,
            f"is 0 and {cause}, so a negative advantage of an older sample may have a gradient of "
            "any size; set it to 3",
        )
