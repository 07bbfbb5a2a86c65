"""transformers' `generate` on the pending requests. See stepping.py for the command line.

Prompts are padded on the left. Requests that arrive during a batch wait for the next one. No keys
and values outlive a batch, because `generate` has neither continuous batching nor a prefix cache.
"""

# pyright: reportMissingImports=false
# transformers is in a separate environment.

from collections.abc import Sequence
from typing import Any

import torch
from stepping import Report, Stepper, main
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from workloads import SLOTS, THREADS


class Rows(BaseStreamer):
    """Streamer that reports the new tokens of every row of a batch."""

    def __init__(self, numbers: Sequence[int], report: Report) -> None:
        self._numbers, self._report = numbers, report
        self._prompt = True  # the prompt comes first and is not reported

    def put(self, value: Any) -> None:
        if not self._prompt:
            for number, token_id in zip(self._numbers, value.tolist(), strict=True):
                self._report(number, [token_id])
        self._prompt = False

    def end(self) -> None:
        pass


class Engine:
    """Model and the requests that wait for it."""

    def __init__(self, model: str, dtype: str) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(0)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.generation_config.eos_token_id = None
        self._waiting: list[tuple[int, list[int], int]] = []

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        self._waiting.append((number, list(prompt), new))

    def step(self, report: Report) -> None:
        """Run a whole batch of requests with the same number of new tokens."""
        new = self._waiting[0][2]
        batch = [waiting for waiting in self._waiting if waiting[2] == new][:SLOTS]
        self._waiting = [waiting for waiting in self._waiting if waiting not in batch]
        width = max(len(prompt) for _, prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(p)) + p for _, p, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p, _ in batch])
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new,
                pad_token_id=0,
                streamer=Rows([number for number, _, _ in batch], report),
            )


def make(model: str, dtype: str) -> Stepper:
    return Engine(model, dtype)


if __name__ == "__main__":
    main(make, ("transformers", "torch"))
