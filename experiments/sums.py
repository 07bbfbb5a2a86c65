"""Train a small model to add with GRPO alone, with agents in several languages.

The agents use no framework: agents/from_scratch.py is a loop around the plain openai client. Others
use the ollama client or are not in Python. There are no demonstrations. docs/agents.md describes
the inputs of such a program.

    python experiments/sums.py --config experiments/configs/sums_cpu.yaml [key=value ...]

Settings for other agents on the same task (the last one runs in an environment with only openai):

    agent.function=agents/ollama_chat.py:run
    agent.command='node agents/any_program/ask.mjs' agent.reward=agents/sum_answers.py:reward
    agent.command='sh agents/any_program/ask.sh' agent.reward=agents/sum_answers.py:reward
    agent.python=OTHER/bin/python

The same command resumes after a crash, and `run_dir=DIR` starts another run.
"""

import sys

from lightning_jax.cli.main import main

LOAD = "data.load=experiments/data/sums.py:load_sums"

if __name__ == "__main__":
    sys.exit(main(["train", LOAD, *sys.argv[1:]]))
