"""Train a small model by RL to answer questions with SQL in an agent's loop.

The agent is agents/spider_sql.py: LangGraph with up to three queries and a checker. It calls the
policy in this process. Training starts with supervised steps on gold queries, because a 135M model
never finds a reward at first. Then it runs GRPO on execution accuracy.

    python experiments/spider.py --config experiments/configs/spider_cpu.yaml [key=value ...]

Without `data.root` the tasks are generated. README.md has the greedy reward on unseen databases
after a few minutes of training on 2 CPU cores. `data.root=DIR` reads Spider as published. The same
command resumes after a crash, and `run_dir=DIR` starts another run.
"""

import sys

from lightning_jax.cli.main import main

LOAD = "data.load=experiments/data/spider.py:load_spider"

if __name__ == "__main__":
    sys.exit(main(["train", LOAD, *sys.argv[1:]]))
