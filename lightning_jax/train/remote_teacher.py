"""Teacher behind a URL, which scores the tokens that the policy sampled.

The server gets token ids and echoes them with their log-probabilities, as the legacy completions of
OpenAI, vLLM and `lightning-jax serve` do. Prompts that calls share are computed once if it has a
prefix cache.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from lightning_jax.errors import UserError
from lightning_jax.models.formats.names import ModelError
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.config import DistillConfig
from lightning_jax.rl.distill import Scores
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError

CONCURRENCY = 16  # requests at once
MAX_RETRIES = 6  # with growing pauses, about a minute in all
TIMEOUT_S = 600.0
PROBE = "Die Straße: 1 + 1 = 2, naïve?\n\tdef f(x): return x"  # different tokens by vocabulary
NO_KEY = "none"


class TeacherError(UserError, RuntimeError):
    """Failure of the teacher's server: no answer, or one without scores."""


@dataclass(frozen=True)
class RemoteTeacher:
    """Server that scores tokens at temperature 1."""

    client: openai.OpenAI
    served_model: str
    tokenizer: Tokenizer

    def score(self, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the scores of each response, 0 where a token is not trained.

        A sequence sampled at another temperature than 1 has None. Raises TeacherError if the server
        fails, and ModelError if its vocabulary is another one.
        """
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._score, sequences))

    def check(self) -> None:
        """Score a short text. Raises TeacherError or ModelError if that fails."""
        self._logprobs(self.tokenizer.encode(PROBE))

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _score(self, sequence: TrainingSequence) -> tuple[float, ...] | None:
        if sequence.temperature != 1.0:
            return None
        prompt = sequence.teacher_prompt_ids or sequence.prompt_token_ids
        logprobs = self._logprobs([*prompt, *sequence.response_token_ids])[len(prompt) :]
        pairs = zip(logprobs, sequence.loss_mask, strict=True)
        return tuple(value if trained else 0.0 for value, trained in pairs)

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after those before it, and 0 for the first."""
        try:
            reply = self.client.completions.create(
                model=self.served_model,
                prompt=list(ids),
                echo=True,
                logprobs=1,
                max_tokens=1,
                temperature=1.0,
                extra_body={"skip_special_tokens": False},
            )
        except openai.OpenAIError as error:
            raise TeacherError(
                f"the teacher at {self.client.base_url} failed: {_brief(error)}; check "
                "distill.teacher_url, served_model and the key, then run the same command again.",
                reason="teacher_failed",
                key="distill.teacher_url",
            ) from error
        choice = reply.choices[0]
        found: list[Any] = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if len(found) < len(ids) or any(value is None for value in found[1 : len(ids)]):
            raise TeacherError(
                f"the teacher at {self.client.base_url} gave {len(found)} log-probabilities for "
                f"{len(ids)} tokens; it must answer completions with echo and logprobs.",
                reason="not_scored",
                key="distill.teacher_url",
            )
        self._check_vocabulary(ids, choice.text)
        return [0.0, *map(float, found[1 : len(ids)])]

    def _check_vocabulary(self, ids: Sequence[int], text: str) -> None:
        """Raise ModelError unless the echoed text is that of the ids, up to white space."""
        expected = {self.tokenizer.decode(ids, skip_special=skip) for skip in (False, True)}
        echoed = "".join(text.split())
        if not any(echoed.startswith("".join(text.split())) for text in expected):
            raise ModelError(
                f"the teacher {self.served_model!r} at {self.client.base_url} reads other text "
                "from the policy's token ids, so it has another vocabulary; serve a model with the "
                "same tokenizer.",
                reason="mismatch",
                key="distill.teacher_url",
            )


def connect(config: DistillConfig, tokenizer: Tokenizer) -> RemoteTeacher:
    """Return the teacher behind `distill.teacher_url`, once it has scored a short text.

    Raises ConfigError if the variable of its key is not set, TeacherError if the server cannot
    score tokens, and ModelError if it has another vocabulary.
    """
    assert config.served_model is not None, "the settings were checked"
    key = NO_KEY if config.api_key_env is None else os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"the environment variable {config.api_key_env} of the teacher's key is not set; set "
            "it.",
            reason="missing",
            key=config.api_key_env,
        )
    client = openai.OpenAI(
        base_url=config.teacher_url, api_key=key, max_retries=MAX_RETRIES, timeout=TIMEOUT_S
    )
    teacher = RemoteTeacher(client, config.served_model, tokenizer)
    try:
        teacher.check()
    except BaseException:
        teacher.close()
        raise
    return teacher


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
