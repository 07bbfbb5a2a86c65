"""Train a small model by RL to answer questions with SQL in an agent's loop.

The agent is agents/spider_sql.py: LangGraph with up to three queries and a checker. It calls the
policy in this process. Training starts with supervised steps on gold queries, because a 135M model
never finds a reward at first. Then it runs GRPO on execution accuracy.

    python experiments/spider.py --config experiments/configs/spider_cpu.yaml [key=value ...]

Without `data.root` the tasks are generated. README.md has the greedy reward on unseen databases
after a few minutes of training on 2 CPU cores. `data.root=DIR` reads Spider as published. The same
command resumes after a crash, and `run_dir=DIR` starts another run.
"""

from data.spider import load_spider

from lightning_jax.cli.train import load_splits, run_main, train_and_report
from lightning_jax.train.config import Config


def main(config: Config) -> None:
    train_and_report(config, *load_splits(config, load_spider))


if __name__ == "__main__":
    run_main(main, __doc__)
