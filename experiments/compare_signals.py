"""Train on one task with several signals, and compare them.

    grpo           rewards alone
    warmup_grpo    demonstrations, then rewards: the config as it is
    hint           the policy with a hint as its own teacher, and no rewards
    hint_grpo      the same, whose weight falls to 0 while rewards count from the first step
    best_of_group  demonstrations, then supervised steps on the best attempt of each group
    difficulty     demonstrations, then rewards, with tasks that are solved in some attempts
    dynamic        demonstrations, then rewards, with new groups drawn for those without a gradient

    python experiments/compare_signals.py --config experiments/configs/spider_cpu.yaml
        [--signal hint --signal grpo] [--seeds 3] [--first-seed 0] [--jobs 1] [--axis samples]
        [--report] [key=value ...]

Runs are in `run_dir`, and finished ones are kept. The end of the output is that of `lightning-jax
compare`, with seeds as runs of one experiment. signals.png has the curves.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sweep import add_flags, load_settings, refuse, run_all

from lightning_jax.cli.main import main as lightning_jax
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config

NO_WARMUP = "warmup.num_steps=0"
SIGNALS: Mapping[str, Sequence[str]] = {
    "warmup_grpo": (),
    "grpo": (NO_WARMUP,),
    "hint": (NO_WARMUP, "distill.reward_coef=0"),
    "hint_grpo": (NO_WARMUP, "distill.final_coef=0"),
    "best_of_group": ("algorithm.loss=raft", "algorithm.normalize=none"),
    "difficulty": ("data.sampler=difficulty",),
    "dynamic": ("algorithm.max_sampling_rounds=3",),
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
    parser.add_argument("--axis", choices=("steps", "samples", "minutes"), default="samples")
    add_flags(parser, num_seeds=3)
    args = parser.parse_intermixed_args()
    config = load_settings(args)
    try:
        variants = {name: settings_of(name, config) for name in args.signal or SIGNALS}
    except ConfigError as error:
        refuse(error)
    parent = Path(config.run_dir)
    runs = run_all(args, variants, parent)
    groups = [",".join(map(str, paths)) for paths in runs.values()]
    if len(groups) == 1:  # seeds of one signal, beside each other
        groups = groups[0].split(",")
    if len(groups) == 1:
        print(f"{groups[0]} is the only run that has finished, so it is compared with none")
        return 0
    return lightning_jax(
        ["compare", *groups, "--axis", args.axis, "--png", str(parent / "signals.png")]
    )


if __name__ == "__main__":
    sys.exit(main())
