"""Train a small model by RL to solve word problems with a calculator.

The agent is agents/calcx_math.py: AutoGen's AssistantAgent with a calculator from an MCP server. It
calls the policy in this process. Training starts with supervised steps on solutions, because a 135M
model makes no well-formed call at first. Then GRPO rewards the right number as the answer.

    python experiments/calcx.py --config experiments/configs/calcx_cpu.yaml [key=value ...]

Without `data.root` the problems are generated; docs/results.md has the results. `data.root=DIR`
reads Calc-X as published. To train without the calculator, set
`agent.function=agents/calcx_math.py:run_without_tool`
`warmup.demonstrations=agents/calcx_math.py:demonstrate_without_tool`. The same command resumes
after a crash, and `run_dir=DIR` starts another run.
"""

import time
from collections.abc import Callable
from typing import Any

from data.calcx import load_calcx

from lightning_jax.cli.train import load_splits, run_main, train_and_report
from lightning_jax.loading import load_function
from lightning_jax.rollouts.runner import load_agent
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config


def calculator_usage(agent: str) -> Callable[[], Any] | None:
    """Return the `usage` function of the agent's file, or None if it has none."""
    try:
        return load_function(f"{agent.rpartition(':')[0]}:usage")
    except ConfigError:
        return None


def main(config: Config) -> None:
    agent = config.agent
    usage = None
    if agent.command is None and agent.python is None:
        load_agent(agent.function)  # fails early if a package is missing
        usage = calculator_usage(agent.function)
    train_tasks, dev_tasks = load_splits(config, load_calcx)
    print(f"{sum('chain' in task for task in train_tasks)} train tasks come with a solution")
    started = time.monotonic()
    train_and_report(config, train_tasks, dev_tasks)
    if usage is None:
        return  # each rollout has its own process, whose counters are not visible here
    used, seconds = usage(), time.monotonic() - started
    print(
        f"calculator: {used.calls} calls of {1000 * used.call_s / max(used.calls, 1):.1f} ms, "
        f"{used.starts} starts, {used.start_s:.1f} s of {seconds:.0f} s ({used.broken} broke)"
    )


if __name__ == "__main__":
    run_main(main, __doc__)
