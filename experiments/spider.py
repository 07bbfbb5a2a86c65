"""Does reinforcement learning teach a small model to answer questions with SQL, in an agent's loop?

The agent is agents/spider_sql.py: LangGraph, up to three queries, a checker. Its calls go to the
policy in this process. First some supervised steps on gold queries (a 135M model never finds a
reward by itself), then GRPO on execution accuracy.

    python experiments/spider.py --config experiments/configs/spider_cpu.yaml [key=value ...]

With no `data.root` the tasks are made here (six minutes of training on 2 CPU cores raise the greedy
reward on unseen databases; see README.md for the figures). `data.root=DIR` reads Spider as
published. The same command goes on after a crash; `run_dir=DIR` starts another run.
"""

import argparse
import asyncio
import errno
import logging
import sys
from pathlib import Path

from lightning_jax.config import Config, load_config
from lightning_jax.datasets.spider import load_spider
from lightning_jax.trainer import train
from lightning_jax.types import UserError


def main(config: Config) -> None:
    directory = Path(config.run_dir)
    cache = directory.parent / "data"
    train_tasks, left_out = load_spider(config.data.root, "train", config.data, cache)
    dev_tasks, dev_left_out = load_spider(config.data.root, "dev", config.data, cache)
    print(f"{len(train_tasks)} train tasks {left_out}, {len(dev_tasks)} dev tasks {dev_left_out}")
    print(f"run directory: {directory}")
    rows = asyncio.run(train(config, train_tasks, dev_tasks))
    print("\nstep  greedy reward on dev tasks")
    for row in rows:
        if "eval/reward_mean" in row:
            mean, error = row["eval/reward_mean"], row["eval/reward_stderr"]
            print(f"{row['step']:4.0f}  {mean:.3f} ± {error:.3f} (n={row['eval/num_tasks']:.0f})")
    print(f"\ncurves: {directory / 'curves.png'}   policy: {directory / 'policy'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True, help="a YAML file of settings")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="later ones win")
    arguments = parser.parse_args()
    # force: libraries that were imported above have set up the root logger for themselves.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("lightning_jax").setLevel(logging.INFO)
    try:
        main(load_config(Config, [arguments.config, *arguments.settings]))
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        sys.exit(f"error: {error}; free or open the place, then the same command goes on")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the last checkpoint")
