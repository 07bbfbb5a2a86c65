"""Records of the engine: what a request asks for and what it gets."""

from dataclasses import dataclass
from functools import cached_property

from lightning_jax.settings.schema import check_rules
from lightning_jax.types import FinishReason, check_same_length, fill_default

TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), best first
MAX_TOP_LOGPROBS = 20
LONGEST_WAIT = "serve/longest_wait_s"  # of a request for its next token, since the start


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one response.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 0 are off. A logit
    becomes logit + bias - frequency_penalty * count - presence_penalty * (count > 0). Here count is
    the number of times the response already contains the token. Tokens that `grammar` forbids are
    never sampled.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: chosen by the server
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0  # number of alternatives to report per token
    grammar: str | None = None  # grammar of the response, in llguidance's format
    ignore_eos: bool = False  # continue after an end-of-turn token, for benchmarks
    score_prompt: bool = False  # also return log-probabilities of the prompt's tokens
    shown_ids: tuple[int, ...] = ()  # special tokens whose text is part of the response's text
    continues_text: bool = False  # the response's text continues the prompt's, first blank included

    @cached_property
    def has_filters(self) -> bool:
        """True if unlikely tokens are never sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def __post_init__(self) -> None:
        biases = [-100.0 <= bias <= 100.0 and token >= 0 for token, bias in self.logit_bias]
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 10.0, "between 0 and 10"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p < 1.0, "at least 0 and below 1"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "at most 16 non-empty strings"),
            ("logit_bias", all(biases), "token ids of 0 or more with values between -100 and 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            (
                "top_logprobs",
                0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                f"between 0 and {MAX_TOP_LOGPROBS}",
            ),
            ("grammar", self.grammar != "", "None (off) or a grammar's text"),
            (
                "ignore_eos",
                not self.ignore_eos or self.grammar is None,
                "False where a grammar says when the response is complete",
            ),
        )
        check_rules(
            self, ((key, ok, f"expected {text}", "out_of_range") for key, ok, text in rules)
        )


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the policy at temperature 1 for each prompt token after the first."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]  # likeliest tokens at each position

    def __post_init__(self) -> None:
        check_same_length(self, "logprobs", "top_logprobs")


@dataclass(frozen=True)
class Completion:
    """Finished response of the engine, token by token.

    By default `forced` is all False, `top_logprobs` is empty for each token, and
    `tempered_logprobs` equals `behavior_logprobs`.
    """

    token_ids: tuple[int, ...]  # as sampled, including the end-of-turn token
    # For the client: without special tokens but SamplingParams.shown_ids, cut before a stop string.
    text: str
    behavior_logprobs: tuple[float, ...]  # of the policy at temperature 1, unfiltered
    sampling_logprobs: tuple[float, ...]  # of the sampled distribution, tempered and filtered
    policy_versions: tuple[int, ...]  # weights version that sampled each token
    finish_reason: FinishReason
    forced: tuple[bool, ...] = ()  # True if the grammar allowed only this token
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of the policy, like `behavior_logprobs`
    prompt_scores: PromptScores | None = None  # if requested
    # Of the policy at the request's temperature (1 if greedy), unfiltered and unbiased.
    tempered_logprobs: tuple[float, ...] = ()
    is_late: bool = False  # its time limit ended it, and `finish_reason` is "length"
    stop: str = ""  # the stop string that ended it, if one did
    num_cached: int = 0  # tokens of the prompt that the prefix cache had

    def __post_init__(self) -> None:
        fill_default(self, "forced", False, like="token_ids")
        fill_default(self, "top_logprobs", (), like="token_ids")
        if not self.tempered_logprobs:
            object.__setattr__(self, "tempered_logprobs", self.behavior_logprobs)
        check_same_length(
            self,
            "token_ids",
            "behavior_logprobs",
            "sampling_logprobs",
            "tempered_logprobs",
            "policy_versions",
            "forced",
            "top_logprobs",
        )
