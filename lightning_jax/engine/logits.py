"""Logit changes for one request: bias, penalties and the grammar's mask.

No JAX, no threads. Biases and penalties are summed on the host. Masks stay packed.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.engine.grammar.process import Matcher
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue


def moves_logits(sampling: SamplingParams) -> bool:
    """Return True if the request samples from logits other than the policy's."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.grammar is not None
    )


def only_masks(sampling: SamplingParams) -> bool:
    """Return True if a grammar is all that parts the samples from the policy, at its temperature.

    Greedy responses are samples of nothing.
    """
    has_filter = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    is_free = replace(sampling, grammar=None)
    return bool(
        sampling.grammar is not None
        and sampling.temperature > 0.0
        and not (has_filter or moves_logits(is_free))
    )


@dataclass
class LogitAdjuster:
    """Logit changes for the next token of one request, given its response so far.

    `begin` opens the matcher of a request with a grammar. Raises ValueError if a bias names a token
    outside the vocabulary.
    """

    sampling: SamplingParams
    vocab_size: int
    matcher: Matcher | None = None
    counts: Counter[int] = field(default_factory=Counter)  # of the response's tokens so far

    def __post_init__(self) -> None:
        biases: defaultdict[int, float] = defaultdict(float)
        for token_id, bias in self.sampling.logit_bias:
            if token_id >= self.vocab_size:
                raise InvalidValue.out_of_range(
                    "logit_bias",
                    f"logit_bias has token id {token_id}; the model's largest is "
                    f"{self.vocab_size - 1}. Encode with the model's own tokenizer.",
                )
            biases[token_id] += bias
        self._biased_ids = np.fromiter(biases, np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))

    def begin(self, grammars: GrammarCompiler) -> None:
        """Open a matcher if the request has a grammar.

        Raises the errors of `GrammarCompiler.open`.
        """
        if self.sampling.grammar is not None:
            self.matcher = grammars.open(self.sampling.grammar)

    def end(self) -> None:
        """Close the matcher."""
        if self.matcher:
            self.matcher.close()
            self.matcher = None

    def poll(self) -> None:
        """Take the mask of the next token if it has arrived.

        Raises the errors of `Matcher.packed`.
        """
        if self.matcher:
            self.matcher.poll()

    @property
    def is_ready(self) -> bool:
        """True if the next token can be sampled: its mask has arrived, or it needs none."""
        return self.matcher is None or self.matcher.has_mask

    @property
    def depends_on_tokens(self) -> bool:
        """True if the next token's logits depend on the response so far."""
        sampling = self.sampling
        penalties = sampling.presence_penalty or sampling.frequency_penalty
        return bool(penalties) or sampling.grammar is not None

    @property
    def has_bias(self) -> bool:
        """True if `add_to` changes anything at the next token."""
        penalties = self.sampling.presence_penalty or self.sampling.frequency_penalty
        return bool(len(self._biased_ids) or (self.counts and penalties))

    @property
    def forced(self) -> bool:
        """True if the grammar allows only one next token."""
        return self.matcher is not None and self.matcher.forced is not None

    def add_to(self, row: Float32[np.ndarray, " V"]) -> None:
        """Add biases and penalties to `row`, the bias of the next token's logits."""
        row[self._biased_ids] += self._biases
        frequency, presence = self.sampling.frequency_penalty, self.sampling.presence_penalty
        if self.counts and (frequency or presence):
            ids = np.fromiter(self.counts, np.int64)
            times = np.fromiter(self.counts.values(), np.float32)
            row[ids] -= times * np.float32(frequency) + np.float32(presence)

    def push(self, token_id: int) -> None:
        """Record a sampled token that does not end the response.

        If the grammar does not allow it, the next `poll` raises.
        """
        self.counts[token_id] += 1
        if self.matcher:
            self.matcher.push(token_id)
