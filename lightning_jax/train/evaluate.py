"""Evaluation on the dev tasks, greedy and sampled, at the steps that the settings name."""

import time
from collections.abc import Sequence

from lightning_jax.rollouts.results.metrics import (
    eval_change,
    eval_metrics,
    eval_metrics_by,
    sampled_metrics,
)
from lightning_jax.traces.store import Store
from lightning_jax.train.collect import Collector
from lightning_jax.train.config import Config
from lightning_jax.types import FINISHED, Metrics, Task


async def evaluate_if_due(
    config: Config, collector: Collector, store: Store, tasks: Sequence[Task], step: int
) -> Metrics:
    """Return metrics of the evaluation before `step`, or {} if none is due.

    A step that the store has evaluated completely is due, so that a run that was made longer or
    shorter keeps its results.
    """
    settings, after_warmup = config.eval, step - config.warmup.num_steps
    if step == 0 or after_warmup == 0:
        is_named = settings.at_start
    else:
        is_named = after_warmup > 0 and settings.every > 0 and after_warmup % settings.every == 0
    is_named |= step == config.total_steps
    if not tasks or not (is_named or await _was_evaluated(store, tasks, step)):
        return {}
    started = time.monotonic()
    rollouts = await collector.run(tasks, "eval", step)
    results = eval_metrics(rollouts) | eval_metrics_by(settings.by, tasks, rollouts)
    since = 0 if after_warmup <= 0 else config.warmup.num_steps
    before = await store.in_order(store.rollouts, phase="eval", step=since)
    # The change made by the warm-up or by the policy phase.
    if since < step and (change := eval_change(before, rollouts)):
        results |= change | {"eval/change_since_step": float(since)}
    if settings.attempts:
        sampled = await collector.run(tasks, "sampled", step, settings.attempts)
        results |= sampled_metrics(sampled)
        if since < step:
            before = await store.in_order(store.rollouts, phase="sampled", step=since)
            results |= eval_change(before, sampled, "eval/sampled_")
    return results | {"time/eval_s": time.monotonic() - started}


async def _was_evaluated(store: Store, tasks: Sequence[Task], step: int) -> bool:
    stored = await store.in_order(store.rollouts, phase="eval", step=step)
    done = {r.task_id for r in stored if r.status in FINISHED and not r.superseded}
    return done.issuperset(str(task["id"]) for task in tasks)
