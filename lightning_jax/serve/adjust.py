"""What one request adds to its logits: bias, penalties, and its grammar's mask. No JAX, no threads.

The sum is made on the host and goes into the step as one dense array, so the engine has one program
for all of it.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32

from lightning_jax.serve.constraint import Matcher
from lightning_jax.types import SamplingParams


def needs_adjusting(sampling: SamplingParams) -> bool:
    """Whether the request's steps take a bias, or give the likeliest tokens."""
    return moves_logits(sampling) or sampling.top_logprobs > 0


def moves_logits(sampling: SamplingParams) -> bool:
    """Whether the request draws from other logits than the policy's."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.grammar is not None
    )


@dataclass
class LogitAdjuster:
    """One request's response so far, as far as it changes what is drawn next.

    Raises ValueError for a bias of a token that the vocabulary lacks, GrammarError if the grammar
    allows no beginning.
    """

    sampling: SamplingParams
    vocab_size: int
    matcher: Matcher | None = None
    counts: Counter[int] = field(default_factory=Counter)  # response tokens so far

    def __post_init__(self) -> None:
        for token_id, _ in self.sampling.logit_bias:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"logit_bias has token id {token_id}; expected at most {self.vocab_size - 1}. "
                    "Encode with the model's own tokenizer."
                )
        if self.matcher:
            self.matcher.allowed()  # fails now rather than in a step

    @property
    def forced(self) -> bool:
        """Whether the next token is the only one that the grammar allows."""
        return self.matcher is not None and self.matcher.forced is not None

    def add_to(self, row: Float32[np.ndarray, " V"]) -> None:
        """Adds to the row what belongs to the logits of the next token."""
        for token_id, bias in self.sampling.logit_bias:
            row[token_id] += bias
        frequency, presence = self.sampling.frequency_penalty, self.sampling.presence_penalty
        if self.counts and (frequency or presence):
            ids = np.fromiter(self.counts, np.int64)
            times = np.fromiter(self.counts.values(), np.float32)
            row[ids] -= times * np.float32(frequency) + np.float32(presence)
        if self.matcher:
            row[~self.matcher.allowed()] = -np.inf

    def push(self, token_id: int) -> None:
        """Takes a sampled token that does not end the response. Raises GrammarError if the grammar
        cannot go on from it.
        """
        self.counts[token_id] += 1
        if self.matcher:
            self.matcher.push(token_id)
            self.matcher.allowed()  # as above
