"""llama.cpp in this process, with many sequences in one batch.

See stepping.py for the command line.

Prompts and responses stay in the sequences' caches. A request starts from the sequence with the
longest common prefix. It waits a step if that prefix is being computed for another request.
"""

# pyright: reportMissingImports=false
# llama.cpp is in a separate environment.

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from gguf_file import gguf_of
from stepping import Report, Stepper, main
from workloads import MAX_LEN, SLOTS, THREADS

BATCH = 2048  # tokens per step, as in llama.cpp's own server


@dataclass
class Slot:
    """One sequence: the contents of its cache and its request."""

    token_ids: list[int] = field(default_factory=list)  # includes sampled tokens at once
    cached: int = 0  # how many of them have keys and values
    number: int | None = None  # its request
    left: int = 0  # tokens to sample
    used: int = 0  # last step that used it


@dataclass(frozen=True)
class Waiting:
    """Request without a slot."""

    number: int
    prompt: list[int]
    new: int


class Engine:
    """llama.cpp's model and context, and the use of its sequences."""

    def __init__(self, model: str, dtype: str) -> None:
        if dtype != "bfloat16":
            raise ValueError(f"dtype is {dtype!r}; expected bfloat16, the file's.")
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, None)
        self._quiet = quiet  # C keeps no reference to it
        llama_cpp.llama_backend_init()
        path = str(gguf_of(Path(model))).encode()
        loaded = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {path.decode()}.")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = SLOTS * MAX_LEN, BATCH, SLOTS
        settings.n_threads = settings.n_threads_batch = THREADS
        # One cache per sequence. In a common cache, every token would read other sequences, too.
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(loaded, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(loaded)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._slots = [Slot() for _ in range(SLOTS)]
        self._waiting: deque[Waiting] = deque()
        self._steps = 0
        self._rng = np.random.default_rng(0)

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        self._waiting.append(Waiting(number, list(prompt), new))

    def step(self, report: Report) -> None:
        """Run one batch: a token of every running sequence, and as many prompt tokens as fit."""
        self._steps += 1
        self._admit()
        rows = self._fill()
        if llama_cpp.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama.cpp failed to decode a batch.")
        if not rows:
            return
        token_ids = self._sample(list(rows.values()))
        for slot, token_id in zip(rows, token_ids, strict=True):
            running = self._slots[slot]
            assert running.number is not None, "a slot with a row has a request"
            running.token_ids.append(token_id)
            running.left -= 1
            number = running.number
            if running.left == 0:
                running.number = None
            report(number, [token_id])

    def _admit(self) -> None:
        """Assign slots to requests.

        A request waits if it can share a prefix computed in this step.
        """
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if not self._place(request):
                self._waiting.append(request)

    def _place(self, request: Waiting) -> bool:
        free = [i for i, slot in enumerate(self._slots) if slot.number is None]
        if not free:
            return False
        prompt = request.prompt
        lengths = [common(prompt, slot.token_ids) for slot in self._slots]
        ready = [min(n, slot.cached) for n, slot in zip(lengths, self._slots, strict=True)]
        best = max(range(SLOTS), key=lambda i: (ready[i], i in free))
        if max(lengths) > ready[best] + 32:
            return False
        # Compute at least the last token, for its logits.
        shared = min(ready[best], len(prompt) - 1)
        target = best if best in free and shared else min(free, key=lambda i: self._slots[i].used)
        if target != best:
            llama_cpp.llama_memory_seq_rm(self._memory, target, -1, -1)
            if shared:
                llama_cpp.llama_memory_seq_cp(self._memory, best, target, -1, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, target, shared, -1)
        self._slots[target] = Slot(prompt, shared, request.number, request.new, self._steps)
        return True

    def _fill(self) -> dict[int, int]:
        """Put tokens into the batch. Return the batch index to sample from, by slot."""
        batch, rows, size = self._batch, {}, 0
        running = [i for i, slot in enumerate(self._slots) if slot.number is not None]
        # Decoding sequences need one token each and go first.
        running.sort(key=lambda i: len(self._slots[i].token_ids) - self._slots[i].cached)
        for i in running:
            slot = self._slots[i]
            slot.used = self._steps
            end = min(len(slot.token_ids), slot.cached + BATCH - size)
            for position in range(slot.cached, end):
                batch.token[size], batch.pos[size] = slot.token_ids[position], position
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, i
                batch.logits[size] = position + 1 == len(slot.token_ids)
                size += 1
            slot.cached = end
            if end == len(slot.token_ids) and size:
                rows[i] = size - 1
        batch.n_tokens = size
        return rows

    def _sample(self, rows: list[int]) -> list[int]:
        """Sample one token per row at temperature 1."""
        logits = np.empty((len(rows), self._num_tokens), np.float32)
        for index, row in enumerate(rows):
            address = llama_cpp.llama_get_logits_ith(self._context, row)
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            logits[index] = np.ctypeslib.as_array(pointer, (self._num_tokens,))
        logits -= logits.max(axis=1, keepdims=True)
        sums = np.exp(logits, out=logits).cumsum(axis=1)
        draws = self._rng.random(len(rows), np.float32) * sums[:, -1]
        drawn = [
            np.searchsorted(line, draw, "right") for line, draw in zip(sums, draws, strict=True)
        ]
        return [min(int(i), self._num_tokens - 1) for i in drawn]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)


def make(model: str, dtype: str) -> Stepper:
    return Engine(model, dtype)


if __name__ == "__main__":
    main(make, ("llama_cpp_python",))
