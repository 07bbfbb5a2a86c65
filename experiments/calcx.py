"""Train a small model by RL to solve word problems with a calculator.

The agent is agents/calcx_math.py: AutoGen's AssistantAgent with a calculator from an MCP server. It
calls the policy in this process. Training starts with supervised steps on solutions, because a 135M
model makes no well-formed call at first. Then GRPO rewards the right number as the answer.

    python experiments/calcx.py --config experiments/configs/calcx_cpu.yaml [key=value ...]

Without `data.root` the problems are generated; docs/results/calcx.md has the results.
`data.root=DIR` reads Calc-X as published. To train without the calculator, set
`agent.function=agents/calcx_math.py:run_without_tool`
`warmup.demonstrations=agents/calcx_math.py:demonstrate_without_tool`. The same command resumes
after a crash, and `run_dir=DIR` starts another run.
"""

import sys

from lightning_jax.cli.main import main

LOAD = "data.load=experiments/data/calcx.py:load_calcx"

if __name__ == "__main__":
    exit_code = main(["train", LOAD, *sys.argv[1:]])
    client = sys.modules.get("calculator_client")  # absent if agents have their own processes
    if client and (usage := client.USAGE).calls:
        times = f"{usage.calls:,} calls in {usage.call_s:.1f} s, {usage.starts} starts in"
        print(f"calculator: {times} {usage.start_s:.1f} s, {usage.broken} broken")
    sys.exit(exit_code)
