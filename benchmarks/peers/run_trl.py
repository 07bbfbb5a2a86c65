"""Updates of TRL's GRPOTrainer. See ../updates.py for the command line.

TRL's own loop trains: accelerate, gradient accumulation, its loss (dapo, the default, without a KL
term), its chunked head, clipping and fused AdamW. Only sampled and scored data is replaced. Every
call is a prompt and a completion, padded to the longest of the step like TRL does. Two of its
defaults, bfloat16 and gradient checkpointing, are off unless requested.
"""

# pyright: reportMissingImports=false
# TRL is in a separate environment.

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from updates import LEARNING_RATE, MAX_GRAD_NORM, Call, Clock, Result, main
from workloads import THREADS


def padded(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, mask) of rows padded to one length."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(len(row))
        ids[i, columns], mask[i, columns] = torch.tensor(row), 1
    return ids, mask.long()


class Recorded(GRPOTrainer):
    """Trainer whose every step has the same calls, already scored."""

    def __init__(self, calls: Sequence[Call], **arguments: Any) -> None:
        super().__init__(**arguments)
        prompt_ids, prompt_mask = padded([call.prompt for call in calls], left=True)
        completion_ids, completion_mask = padded([call.response for call in calls], left=False)
        self.recorded = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([call.advantage for call in calls]),
            "num_items_in_batch": completion_mask.sum(),
        }

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.recorded)


class Timer(TrainerCallback):
    """Callback that times each update, from its first microbatch to the optimizer's step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.stop()


def measure(args: argparse.Namespace, calls: Sequence[Call]) -> Result:
    torch.set_num_threads(THREADS)
    rows = min(args.rows, len(calls))
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        settings = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(calls) // rows,
            num_generations=len(calls),
            max_steps=1 + args.steps,
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_checkpointing=args.checkpointing,
            bf16=args.dtype == "bfloat16",
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Recorded(
            calls,
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(calls)}),
            callbacks=[Timer(clock)],
        )
        trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    shapes = (trainer.recorded[name].shape for name in ("prompt_ids", "completion_ids"))
    computed = len(calls) * sum(shape[1] for shape in shapes)
    return clock.result(grad_norm=float(norms[0]), computed=computed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch; 8 is its default")
    parser.add_argument("--checkpointing", action="store_true", help="TRL's default")


if __name__ == "__main__":
    main(measure, ("trl", "torch", "transformers", "accelerate"), add_arguments)
