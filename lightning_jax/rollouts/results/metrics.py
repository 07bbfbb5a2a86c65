"""Metrics of finished rollouts and of the trajectories made from them."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from lightning_jax.rl.token_weights import is_stale
from lightning_jax.rollouts.agents.outcome import DROPPED_METRICS, split_dropped
from lightning_jax.rollouts.results.audit import audit_metrics
from lightning_jax.rollouts.results.compare_tasks import compare_tasks, standard_error
from lightning_jax.rollouts.rewards.components import component_metrics
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import (
    FINISHED,
    FULL_REWARD,
    Metrics,
    Rollout,
    Task,
    Trajectory,
    Transition,
)

Item = TypeVar("Item")

# Maximum names of one kind in a row of metrics: agents' metrics, sub-agents, failure reasons.
MAX_NAMES = 200
MAX_NAME_CHARS = 100
ROUNDING = 1e-6  # rewards that differ by less are equal
OTHER = "other"  # replaces the rarest names beyond MAX_NAMES


def to_trajectories(
    store: Store,
    rollouts: Sequence[Rollout],
    *,
    policy_version: int,
    reader: TraceReader | None = None,
) -> tuple[list[Trajectory], Metrics]:
    """Return (trajectories of rewarded rollouts, metrics of all rollouts).

    Trajectories hold only the calls that train. What is left out is counted under
    `rollout/dropped_<reason>`.
    """
    reader = reader or TraceReader()
    reading = reader.read(store, rollouts)
    trajectories = reading.trajectories
    metrics = {f"rollout/dropped_{metric_code(k)}": float(n) for k, n in reading.dropped.items()}
    metrics |= {f"rollout/rule_{metric_code(name)}": float(n) for name, n in reading.rules.items()}
    metrics |= {f"rollout/num_rollouts/{name}": float(n) for name, n in reading.used.items()}
    metrics |= rollout_metrics(
        reading.rollouts, trajectories, policy_version, max_staleness=reader.max_staleness
    )
    metrics |= agent_metrics(trajectories) | policy_metrics(trajectories)
    metrics |= audit_metrics(reading.rollouts, trajectories)
    num_frozen = sum(
        not call.trains for trajectory in trajectories for call in trajectory.transitions
    )
    if num_frozen:
        metrics["rollout/dropped_frozen_calls"] = float(num_frozen)
    return reading.trained, metrics


def agent_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return metrics of each sub-agent, such as `rollout/calls_mean/agent=writer`.

    `calls_mean` is over all rollouts, `reward_mean` over rollouts in which the sub-agent made a
    call, and the rest over its calls. Empty if no call names a sub-agent.
    """
    return _metrics_by(trajectories, "agent", lambda call: call.agent)


def policy_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the same metrics for each policy, such as `rollout/calls_mean/policy=writer`."""
    return _metrics_by(trajectories, "policy", lambda call: call.answered_by)


def _metrics_by(
    trajectories: Sequence[Trajectory], what: str, name_of: Callable[[Transition], str]
) -> Metrics:
    calls: dict[str, list[Transition]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    all_calls = [call for trajectory in trajectories for call in trajectory.transitions]
    labels = _labels(Counter(name_of(call) or "unnamed" for call in all_calls))
    for trajectory in trajectories:
        named = [labels[name_of(call) or "unnamed"] for call in trajectory.transitions]
        for name, call in zip(named, trajectory.transitions, strict=True):
            calls[name].append(call)
        for name in set(named):
            rewards[name].append(trajectory.reward)
    if set(calls) <= {"unnamed"}:
        return {}
    metrics = {}
    for name, mine in sorted(calls.items()):
        values = {
            "calls_mean": len(mine) / len(trajectories),
            "reward_mean": sum(rewards[name]) / len(rewards[name]),
            "call_reward_mean": sum(call.reward for call in mine) / len(mine),
            **_lengths(mine),
        }
        metrics |= {f"rollout/{key}/{what}={name}": value for key, value in values.items()}
    return metrics


def rollout_metrics(
    rollouts: Sequence[Rollout],
    trajectories: Sequence[Trajectory],
    policy_version: int,
    *,
    max_staleness: int | None = None,
) -> Metrics:
    """Return reward, lengths, staleness and failures by reason for one step's rollouts.

    Means over nothing are left out instead of being 0 or NaN. Staleness is that of tokens that may
    be trained on, so neither of frozen calls nor of calls older than `max_staleness`.
    """
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    limit = policy_version if max_staleness is None else max_staleness  # no call is older
    limits = {"policy_version": policy_version, "max_staleness": limit}
    learned_from = [call for call in calls if call.trains and not is_stale(call, **limits)]
    ages = [policy_version - v for call in learned_from for v in call.policy_versions]
    status = Counter(rollout.status for rollout in rollouts)
    metrics = {
        "rollout/num_rollouts": float(len(rollouts)),
        "rollout/num_scored": float(status["scored"]),
        "rollout/num_agent_failures": float(status["agent_failure"]),
        "rollout/num_infrastructure_failures": float(status["infrastructure_failure"]),
        "rollout/num_retries": float(sum(rollout.attempt > 1 for rollout in rollouts)),
        "rollout/num_calls": float(len(calls)),
        "rollout/response_tokens": float(sum(len(call.response_token_ids) for call in calls)),
        "rollout/prompt_tokens": float(sum(len(call.prompt_token_ids) for call in calls)),
    }
    metrics |= _reported(rollouts, "rollout") | component_metrics(rollouts, "reward/")
    labels = _labels(Counter(metric_code(r.reason) for r in rollouts if r.reason))
    failures = Counter((r.status, labels[metric_code(r.reason)]) for r in rollouts if r.reason)
    metrics |= {f"rollout/{status}_{code}": float(n) for (status, code), n in failures.items()}
    if trajectories:
        rewards = np.asarray([trajectory.reward for trajectory in trajectories])
        metrics |= {
            "rollout/reward_mean": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std()),
            "rollout/full_reward_share": full_reward_share(rewards),
            "rollout/calls_mean": len(calls) / len(trajectories),
        }
    if calls:
        metrics |= {f"rollout/{name}": value for name, value in _lengths(calls).items()}
        metrics |= _entropy(learned_from)
        metrics |= {
            "rollout/response_tokens_max": float(max(len(c.response_token_ids) for c in calls)),
        }
    if ages:
        metrics["train/staleness_mean"] = float(np.mean(ages))
        metrics["train/staleness_max"] = float(max(ages))
        if any(ages):
            number = Counter(ages)
            metrics |= {
                f"train/staleness_share/age={age}": number[age] / len(ages)
                for age in range(max(ages) + 1)
            }
    return metrics


def _entropy(calls: Sequence[Transition]) -> Metrics:
    """Return the mean surprise of a token that the policy chose, at the call's temperature.

    Its expectation is the policy's entropy. {} if no token was chosen.
    """
    surprises = [
        -logprob
        for call in calls
        for logprob, forced in zip(
            call.tempered_logprobs or call.behavior_logprobs, call.forced, strict=True
        )
        if not forced
    ]
    return {"rollout/entropy": math.fsum(surprises) / len(surprises)} if surprises else {}


def _lengths(calls: Sequence[Transition]) -> Metrics:
    """Return length metrics of at least one call."""
    return {
        "response_tokens_mean": sum(len(c.response_token_ids) for c in calls) / len(calls),
        "cut_short_share": sum(call.finish_reason == "length" for call in calls) / len(calls),
    }


def eval_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the mean reward of an evaluation and its standard error. A failed agent counts as 0.

    A task's reward is the mean of its rollouts, so repeats do not make the error look smaller. A
    rollout that the infrastructure failed in all attempts is counted separately.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.status in FINISHED:
            by_task[rollout.group_id].append(earned(rollout))
    rewards = np.asarray([fmean(values) for values in by_task.values()])
    status = Counter(rollout.status for rollout in rollouts)
    metrics = {
        "eval/num_tasks": float(len(rewards)),
        "eval/num_agent_failures": float(status["agent_failure"]),
        "eval/num_infrastructure_failures": float(
            len(rollouts) - status["agent_failure"] - status["scored"]
        ),
    }
    if rewards.size:
        metrics["eval/reward_mean"] = float(rewards.mean())
        metrics["eval/reward_stderr"] = standard_error(rewards)
        metrics["eval/full_reward_share"] = full_reward_share(rewards)
    return metrics | _reported(rollouts, "eval") | component_metrics(rollouts, "eval/reward_")


def eval_change(
    before: Sequence[Rollout], rollouts: Sequence[Rollout], area: str = "eval/"
) -> Metrics:
    """Return how an evaluation differs from an earlier one, per task that both measured.

    See `compare_tasks`. Names start with `area`. Empty if there is no common task.
    """
    change = compare_tasks(task_rewards(before), task_rewards(rollouts))
    if change.change_mean is None or change.change_stderr is None:
        return {}
    return {
        f"{area}change_mean": change.change_mean,
        f"{area}change_stderr": change.change_stderr,
        f"{area}num_better": float(change.num_won),
        f"{area}num_worse": float(change.num_lost),
        f"{area}change_p": change.p_value,
    }


def sampled_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the results of several sampled attempts at each task of an evaluation.

    A failed agent earns 0. The error is the standard error over tasks. Empty without a result.
    """
    rewards = list(task_rewards(rollouts).values())
    if not rewards:
        return {}
    means = np.asarray([fmean(values) for values in rewards])
    unequal, solved = attempt_shares(rewards)
    return {
        "eval/sampled_reward_mean": float(means.mean()),
        "eval/sampled_reward_stderr": standard_error(means),
        "eval/sampled_solved_share": solved,
        "eval/sampled_unequal_share": unequal,
        "eval/sampled_attempts": float(max(map(len, rewards))),
    }


def attempt_shares(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return (share of tasks with different rewards, share of tasks that an attempt solves).

    `rewards` are those of each task's attempts. Solved is the full reward (pass@k of k attempts).
    Both are 0 without a task.
    """
    number = max(len(rewards), 1)
    unequal = sum(max(values) - min(values) > ROUNDING for values in rewards)
    solved = sum(max(values) >= FULL_REWARD for values in rewards)
    return unequal / number, solved / number


def eval_metrics_by(
    field: str | None, tasks: Sequence[Task], rollouts: Sequence[Rollout]
) -> Metrics:
    """Return results for each value of a task field, such as `eval/reward_mean/source=svamp`.

    `rollouts` are in the order of `tasks`. Empty if `field` is None. A task without the field
    counts under `missing`.
    """
    return {
        f"{name}/{part}": value
        for part, members in split_by(field, tasks, rollouts).items()
        for name, value in eval_metrics(members).items()
    }


def split_by(
    field: str | None, tasks: Sequence[Task], items: Sequence[Item]
) -> dict[str, list[Item]]:
    """Return the items of each value of a task field, such as `source=svamp`, sorted by value.

    `items`, such as rollouts, are in the order of `tasks`. Empty if `field` is None.
    """
    if field is None:
        return {}
    parts: dict[str, list[Item]] = defaultdict(list)
    for task, item in zip(tasks, items, strict=True):
        parts[f"{field}={task.get(field, 'missing')}"].append(item)
    return dict(sorted(parts.items()))


def task_rewards(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the rewards of each task's finished rollouts. The newest attempt counts."""
    newest = {(r.task_id, r.index): earned(r) for r in rollouts if r.status in FINISHED}
    rewards: dict[str, list[float]] = defaultdict(list)
    for (task, _), reward in newest.items():
        rewards[task].append(reward)
    return dict(rewards)


def earned(rollout: Rollout) -> float:
    """Return the reward in an evaluation, where a failed agent gets 0, not agent_failure_reward."""
    return rollout.reward or 0.0 if rollout.status == "scored" else 0.0


def full_reward_share(rewards: Float[np.ndarray, " N"]) -> float:
    """Return the share of at least one reward that is 1 or more, up to rounding."""
    return float((rewards >= FULL_REWARD).mean())


def _reported(rollouts: Sequence[Rollout], area: str) -> Metrics:
    """Return means of the numbers that agents returned, such as `eval/agent_f1_mean`.

    Means are over the same rollouts as the reward of an evaluation, with 0 for a failed agent and
    without rollouts whose value was dropped. `dropped_metrics_REASON` is the mean number of these.
    Names beyond MAX_NAMES are left out and counted in the mean of `dropped_metrics`.
    """
    finished = [r for r in rollouts if r.status in FINISHED]
    names = Counter(name for rollout in finished for name in rollout.metrics)
    labels = _labels(Counter({name: n for name, n in names.items() if split_dropped(name) is None}))
    sums: dict[str, float] = defaultdict(float)
    without_value: Counter[str] = Counter()
    for rollout in finished:
        for name, value in rollout.metrics.items():
            if dropped := split_dropped(name):
                sums[f"{DROPPED_METRICS}_{dropped[0]}"] += value
                without_value[dropped[1]] += 1
            else:
                kept = labels[name] == name
                sums[name if kept else DROPPED_METRICS] += value if kept else 1.0
    means = {
        name: sums[name] / max(len(finished) - without_value[name], 1) for name in sorted(sums)
    }
    return {f"{area}/agent_{metric_code(name)}_mean": mean for name, mean in means.items()}


def _labels(counts: Counter[str]) -> dict[str, str]:
    """Return the displayed name for each name in a row of metrics.

    A name that is too long, or rarer than MAX_NAMES others, is displayed as OTHER.
    """
    kept = {name for name, _ in counts.most_common(MAX_NAMES) if len(name) <= MAX_NAME_CHARS}
    return {name: name if name in kept else OTHER for name in counts}


def metric_code(reason: str) -> str:
    """Return the reason as part of a metric's name."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", reason).lower()).strip(
        "_"
    )
