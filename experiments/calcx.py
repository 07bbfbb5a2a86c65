"""Does reinforcement learning teach a small model to solve word problems with a calculator?

The agent is agents/calcx_math.py: AutoGen's AssistantAgent, whose calculator is an MCP server. Its
calls go to the policy in this process. First some supervised steps on solutions (a 135M model makes
no well-formed call by itself), then GRPO on whether the answer is the right number.

    python experiments/calcx.py --config experiments/configs/calcx_cpu.yaml [key=value ...]

With no `data.root` the problems are made here; see docs/results.md for what comes out.
`data.root=DIR` reads Calc-X as published. Without the calculator:
`agent.function=agents/calcx_math.py:run_without_tool`
`warmup.demonstrations=agents/calcx_math.py:demonstrate_without_tool`. The same command goes on
after a crash; `run_dir=DIR` starts another run.
"""

import time
from collections.abc import Callable
from typing import Any

from lightning_jax.config import Config, ConfigError
from lightning_jax.datasets.calcx import load_calcx
from lightning_jax.experiment import load_splits, run_main, train_and_report
from lightning_jax.runner import load_agent, load_function


def calculator_usage(agent: str) -> Callable[[], Any] | None:
    """What tells how much the agent's calculators did, where its file has a function for that."""
    try:
        return load_function(f"{agent.rpartition(':')[0]}:usage")
    except ConfigError:
        return None


def main(config: Config) -> None:
    agent = config.agent
    usage = None
    if agent.command is None and agent.python is None:
        load_agent(agent.function)  # says first what is not installed
        usage = calculator_usage(agent.function)
    train_tasks, dev_tasks = load_splits(config, load_calcx)
    print(f"{sum('chain' in task for task in train_tasks)} train tasks come with a solution")
    started = time.monotonic()
    train_and_report(config, train_tasks, dev_tasks)
    if usage is None:
        return  # each rollout has a process and a calculator of its own, which count for themselves
    used, seconds = usage(), time.monotonic() - started
    print(
        f"calculator: {used.calls} calls of {1000 * used.call_s / max(used.calls, 1):.1f} ms, "
        f"{used.starts} starts, {used.start_s:.1f} s of {seconds:.0f} s ({used.broken} broke)"
    )


if __name__ == "__main__":
    run_main(main, __doc__)
