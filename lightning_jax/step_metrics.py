"""What the numbers of a run's steps say: to a person, and about whether it still learns."""

from collections import Counter
from collections.abc import Sequence

from lightning_jax.metrics import Metrics
from lightning_jax.types import UserError


class NotFinite(UserError, RuntimeError):
    """The gradients of many steps in a row were not finite: the run no longer learns."""


class FiniteWatch:
    """Counts the steps in a row that had no finite gradient, for each set of weights by itself."""

    def __init__(self, weights: Sequence[str], limit: int) -> None:
        self._weights, self._limit = weights, limit
        self._in_a_row: Counter[str] = Counter()

    def see(self, metrics: Metrics, step: int) -> None:
        """Reads a step's metrics. Raises NotFinite where this was one too many. Steps with nothing
        to learn from do not count.
        """
        for name in self._weights:
            of = f"/policy={name}" if name else ""
            num_updates = metrics.get(f"train/num_updates{of}", 0.0)
            if not num_updates:
                continue
            if metrics[f"train/skipped_updates{of}"] < num_updates:
                self._in_a_row[name] = 0
                continue
            self._in_a_row[name] += 1
            if self._in_a_row[name] >= self._limit:
                raise NotFinite(
                    f"the gradient{f' of {name}' if name else ''} was not finite in "
                    f"{self._in_a_row[name]} steps in a row, the last of them step {step}, and the "
                    f"weights did not change; expected fewer than {self._limit} "
                    "(algorithm.max_nonfinite_steps). Lower the learning rate, or look for rewards "
                    "and log-probabilities that are not finite."
                )


def summary(row: Metrics) -> str:
    """The few numbers of a row that a person watches."""
    shown = {
        "eval": "eval/reward_mean",
        "reward": "rollout/reward_mean",
        "loss": "warmup/loss",
        "entropy": "train/entropy",
        "kl": "train/mismatch_kl",
    }
    return " ".join(f"{name} {row[key]:.3g}" for name, key in shown.items() if key in row)


def serve_metrics(before: Metrics, after: Metrics) -> Metrics:
    """What the server did between two readings of its counters."""
    did = {name: after[name] - before[name] for name in after if name in before}
    prompt = did["serve/prefill_tokens"] + did["serve/prefix_hit_tokens"]
    return {
        "serve/requests": did["serve/requests"],
        "serve/steps": did["serve/steps"],
        "serve/tokens_generated": did["serve/tokens_generated"],
        "serve/prefix_hit_share": did["serve/prefix_hit_tokens"] / max(prompt, 1.0),
        "serve/prefix_breaks": did["serve/prefix_breaks"],
        "serve/malformed_tool_calls": did["serve/malformed_tool_calls"],
        "serve/joined_calls": did["serve/joined_calls"],
        "serve/compiles": after["serve/compiles"],
    }
