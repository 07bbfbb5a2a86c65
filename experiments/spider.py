"""Does reinforcement learning teach a small model to answer questions with SQL, in an agent's loop?

The agent is agents/spider_sql.py: LangGraph, up to three queries, a checker. Its calls go to the
policy in this process. First some supervised steps on gold queries (a 135M model never finds a
reward by itself), then GRPO on execution accuracy.

    python experiments/spider.py --config experiments/configs/spider_cpu.yaml [key=value ...]

With no `data.root` the tasks are made here; README.md says what a few minutes of training on 2 CPU
cores do for the greedy reward on unseen databases. `data.root=DIR` reads Spider as published. The
same command goes on after a crash; `run_dir=DIR` starts another run.
"""

from lightning_jax.config import Config
from lightning_jax.datasets.spider import load_spider
from lightning_jax.experiment import load_splits, run_main, train_and_report


def main(config: Config) -> None:
    train_and_report(config, *load_splits(config, load_spider))


if __name__ == "__main__":
    run_main(main, __doc__)
