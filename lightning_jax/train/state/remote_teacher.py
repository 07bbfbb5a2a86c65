"""Teacher behind a URL, which scores the tokens that the policy sampled.

The server gets token ids and echoes them with their log-probabilities, as the legacy completions of
vLLM and `lightning-jax serve` do. At each token it names the likeliest ones, by id. Prompts that
calls share are computed once if it has a prefix cache.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openai

from lightning_jax.errors import UserError
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batches.batch import NO_TOKEN
from lightning_jax.rl.config import DistillConfig
from lightning_jax.rl.distill import Scores
from lightning_jax.rl.sequence import LikelyTokens, TeacherScores, TrainingSequence
from lightning_jax.rollouts.rewards.chat import missing_v1

CONCURRENCY = 16  # requests at once
MAX_RETRIES = 6  # with growing pauses, about a minute in all
TIMEOUT_S = 600.0
PROBE = "Die Straße: 1 + 1 = 2, naïve?\n\tdef f(x): return x"  # different tokens by vocabulary
NO_KEY = "none"
_NAMED_BY_ID = re.compile(r"token_id:(\d+)")  # the form of `return_tokens_as_token_ids`


class TeacherError(UserError, RuntimeError):
    """Failure of the teacher's server: no answer, or one without scores."""


@dataclass(frozen=True)
class RemoteTeacher:
    """Server that scores tokens at temperature 1."""

    client: openai.OpenAI
    served_model: str
    tokenizer: Tokenizer
    top_k: int  # likeliest tokens to ask for; 0: only the scores of the sampled ones
    num_ids: int  # of the policy; the likeliest tokens have ids below it

    def score(self, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the scores of each response.

        A sequence sampled at another temperature than 1 has None. Raises TeacherError if the server
        fails, and ModelError if its vocabulary is another one.
        """
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._score, sequences))

    def check(self) -> None:
        """Score a short text. Raises TeacherError or ModelError if that fails."""
        self._read(self.tokenizer.encode(PROBE), 0)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _score(self, sequence: TrainingSequence) -> TeacherScores | None:
        if sequence.temperature != 1.0:
            return None
        prompt = sequence.teacher_prompt_ids or sequence.prompt_token_ids
        scores = self._read([*prompt, *sequence.response_token_ids], len(prompt))
        pairs = zip(scores.logprobs, sequence.loss_mask, strict=True)
        return replace(
            scores, logprobs=tuple(value if trained else 0.0 for value, trained in pairs)
        )

    def _read(self, ids: Sequence[int], start: int) -> TeacherScores:
        """Return the scores of each token from the index `start` on, after those before it.

        The first of all tokens has none, and so 0.
        """
        try:
            reply = self.client.completions.create(
                model=self.served_model,
                prompt=list(ids),
                echo=True,
                logprobs=max(self.top_k, 1),
                max_tokens=1,
                temperature=1.0,
                extra_body={"skip_special_tokens": False, "return_tokens_as_token_ids": True},
            )
        except openai.OpenAIError as error:
            is_lost = isinstance(error, openai.NotFoundError)
            hint = missing_v1(str(self.client.base_url)) if is_lost else ""
            raise TeacherError(
                f"the teacher at {self.client.base_url} failed: {hint}{_brief(error)}; check "
                "distill.teacher_url, served_model, top_k and the key, then run the same command "
                "again.",
                reason="teacher_failed",
                key="distill.teacher_url",
            ) from error
        choice = reply.choices[0]
        values: list[Any] = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if len(values) < len(ids) or any(value is None for value in values[1 : len(ids)]):
            raise TeacherError(
                f"the teacher at {self.client.base_url} gave {len(values)} log-probabilities for "
                f"{len(ids)} tokens; it must answer completions with echo and logprobs.",
                reason="not_scored",
                key="distill.teacher_url",
            )
        self._check_vocabulary(ids, choice.text)
        logprobs = (0.0, *map(float, values[1 : len(ids)]))[start:]
        if not self.top_k:
            return TeacherScores(logprobs)
        named = (choice.logprobs and choice.logprobs.top_logprobs) or []
        if len(named) < len(ids):
            raise self._no_ids()
        return TeacherScores(logprobs, self._likeliest(named[start : len(ids)]))

    def _likeliest(self, named: Sequence[Mapping[str, float] | None]) -> LikelyTokens:
        """Return the likeliest of the tokens that the server named at each place.

        It also names the sampled one.
        """
        ids = np.zeros((len(named), self.top_k), np.int32)
        logprobs = np.full(ids.shape, NO_TOKEN, np.float32)
        for row, tokens in enumerate(named):
            pairs = []
            for name, value in (tokens or {}).items():
                if (match := _NAMED_BY_ID.fullmatch(name)) is None:
                    raise self._no_ids()
                pairs.append((value, int(match[1])))
            best = sorted(pairs, reverse=True)[: self.top_k]
            for rank, (value, token_id) in enumerate(best):
                if token_id < self.num_ids:
                    ids[row, rank], logprobs[row, rank] = token_id, value
        return LikelyTokens(ids, logprobs)

    def _no_ids(self) -> TeacherError:
        return TeacherError(
            f"the teacher at {self.client.base_url} does not name its likeliest tokens by id; set "
            "distill.kl=sampled.",
            reason="no_ids",
            key="distill.kl",
        )

    def _check_vocabulary(self, ids: Sequence[int], text: str) -> None:
        """Raise ModelError unless the echoed text is that of the ids, up to white space."""
        expected = {self.tokenizer.decode(ids, skip_special=skip) for skip in (False, True)}
        echoed = "".join(text.split())
        if not any(echoed.startswith("".join(text.split())) for text in expected):
            raise ModelError.mismatch(
                "distill.teacher_url",
                f"the teacher {self.served_model!r} at {self.client.base_url} reads other text "
                "from the policy's token ids, so it has another vocabulary; serve a model with the "
                "same tokenizer.",
            )


def connect(config: DistillConfig, tokenizer: Tokenizer, num_ids: int) -> RemoteTeacher:
    """Return the teacher behind `distill.teacher_url`, once it has scored a short text.

    `num_ids` is the size of the policy's vocabulary.
    Raises ConfigError if the variable of its key is not set, TeacherError if the server cannot
    score tokens, and ModelError if it has another vocabulary.
    """
    assert config.served_model is not None, "the settings were checked"
    client = openai.OpenAI(
        base_url=config.teacher_url,
        api_key=config.key or NO_KEY,
        max_retries=MAX_RETRIES,
        timeout=TIMEOUT_S,
        # A server may not send prompts, which hold hints, to another one.
        http_client=openai.DefaultHttpxClient(follow_redirects=False),
    )
    teacher = RemoteTeacher(client, config.served_model, tokenizer, config.num_top, num_ids)
    try:
        teacher.check()
    except BaseException:
        teacher.close()
        raise
    return teacher


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
