"""Train on one task with several signals, and compare them.

    grpo           rewards alone
    warmup_grpo    demonstrations, then rewards: the config as it is
    hint           the policy with a hint as its own teacher, and no rewards
    hint_grpo      the same, whose weight falls to 0 while rewards count from the first step
    best_of_group  demonstrations, then supervised steps on the best attempt of each group
    difficulty     demonstrations, then rewards, with tasks that are solved in some attempts

    python experiments/compare_signals.py --config experiments/configs/spider_cpu.yaml
        [--signal hint --signal grpo] [--seeds 3] [--first-seed 0] [--axis samples] [--report]
        [key=value ...]

The runs go one after another into `run_dir`, and finished ones are kept. The end of the output is
that of `lightning-jax compare`, with seeds as runs of one experiment. signals.png has the curves.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sweep import has_finished, train

from lightning_jax.cli.main import main as lightning_jax
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config

NO_WARMUP = "warmup.num_steps=0"
SIGNALS: Mapping[str, Sequence[str]] = {
    "warmup_grpo": (),
    "grpo": (NO_WARMUP,),
    "hint": (NO_WARMUP, "distill.reward_coef=0"),
    "hint_grpo": (NO_WARMUP, "distill.final_coef=0"),
    "best_of_group": ("algorithm.loss=raft", "algorithm.normalize=none"),
    "difficulty": ("data.sampler=difficulty",),
}


def settings_of(signal: str, config: Config) -> list[str]:
    """Return the settings of a signal. The hint is the function `hint` of the agent's file.

    Raises ConfigError if the agent has no file.
    """
    settings = list(SIGNALS[signal])
    if not signal.startswith("hint"):
        return settings
    agent = config.agent.function
    if not isinstance(agent, str):
        raise ConfigError(
            f"the signal {signal} needs the agent's file; set agent.function.",
            reason="missing",
            key="agent.function",
        )
    settings.append(f"distill.hint={agent.rpartition(':')[0]}:hint")
    if signal == "hint_grpo":
        settings.append(f"distill.anneal_steps={config.num_steps}")
    return settings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--signal", action="append", choices=SIGNALS, help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--axis", choices=("steps", "samples", "minutes"), default="samples")
    parser.add_argument("--report", action="store_true", help="only report runs that have finished")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    try:
        config = load_config(Config, [args.config, *args.settings])
        wanted = {name: settings_of(name, config) for name in args.signal or SIGNALS}
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    parent = Path(config.run_dir)
    runs: dict[str, list[str]] = {name: [] for name in wanted}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, settings in wanted.items():
            directory = parent / f"{name}-{seed}"
            if not args.report:
                more = [*settings, *args.settings, f"seed={seed}"]
                train(directory, ["--config", args.config, *more])
            if has_finished(directory):
                runs[name].append(str(directory))
    groups = [",".join(found) for found in runs.values() if found]
    if sum(map(len, runs.values())) < 2:
        parser.exit(0, "there is nothing to compare with yet: only one run has finished\n")
    return lightning_jax(
        ["compare", *groups, "--axis", args.axis, "--png", str(parent / "signals.png")]
    )


if __name__ == "__main__":
    sys.exit(main())
