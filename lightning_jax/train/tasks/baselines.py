"""Rewards of answers that need no model, such as always the same one."""

from collections.abc import Mapping, Sequence

from lightning_jax.rollouts.agents.outcome import finite
from lightning_jax.rollouts.results.metrics import metric_code, split_by
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function
from lightning_jax.train.config import EvalConfig
from lightning_jax.types import Metrics, Task


def baseline_metrics(config: EvalConfig, tasks: Sequence[Task]) -> Metrics:
    """Return the baselines of the tasks and of their parts, such as `eval/baseline_NAME`.

    Raises ConfigError if the function of `config` fails or returns anything but finite numbers.
    """
    if config.baselines is None or not tasks:
        return {}
    metrics = _baselines(config.baselines, tasks, "")
    for part, members in split_by(config.by, tasks, tasks).items():
        metrics |= _baselines(config.baselines, members, f"/{part}")
    return metrics


def _baselines(reference: str, tasks: Sequence[Task], part: str) -> Metrics:
    try:
        found = load_function(reference)([dict(task) for task in tasks])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"eval.baselines raised {type(error).__name__}: {error}; mend {reference}.",
            reason="failed",
            key="eval.baselines",
        ) from error
    values = found if isinstance(found, Mapping) else {"result": found}
    numbers = {str(name): finite(value) for name, value in values.items()}
    metrics = {
        f"eval/baseline_{metric_code(name)}{part}": value
        for name, value in numbers.items()
        if value is not None
    }
    if not isinstance(found, Mapping) or len(metrics) < len(values):
        raise ConfigError(
            f"eval.baselines returned {found!r}; return a dict of finite numbers by name.",
            reason="wrong_type",
            key="eval.baselines",
        )
    return metrics
