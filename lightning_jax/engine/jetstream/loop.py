"""JetStream's unmodified Driver behind the asyncio interface of `EngineLoop`.

The Driver reads the weights once, at the start, so this mode can serve but not train.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from lightning_jax.engine.admission import SlotLoop
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.generation import (
    ChunkDelivery,
    EngineError,
    Generation,
    deliver,
    news_of,
)
from lightning_jax.engine.jetstream.engine import (
    JetStreamEngine,
    Prompt,
    PromptText,
    RecordedToken,
    orchestrator,
)
from lightning_jax.engine.logits import moves_logits
from lightning_jax.engine.response import Response, SampledToken, TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import FinishReason


class _Channel:
    """Destination of a request's tokens. It also ends the request, which the Driver cannot do."""

    def __init__(self, owner: "JetStreamLoop", generation: Generation, response: Response) -> None:
        self._owner, self._generation, self._response = owner, generation, response
        self.active: Any = None  # the Driver's own record of the request
        self.cancelled = False

    def add_result(self, samples: Sequence[Any]) -> None:
        """Receive the tokens of a step. The Driver calls this, then checks `active.complete`."""
        for token in samples[0].token_ids:
            if not self.cancelled and not self.active.complete.all():
                self._push(token)
        if self.cancelled:
            self._end("cancelled")

    def close(self) -> None:
        """Do nothing. The Driver calls this when it has freed the slot."""

    def _push(self, token: RecordedToken) -> None:
        sampled = SampledToken(
            int(token),
            token.behavior_logprob,
            token.sampling_logprob,
            token.tempered_logprob,
            self._owner.version,
        )
        reason = self._response.push(sampled, self._owner.stalled_s())
        self._owner.count_token()
        if reason:
            self._end(reason)
        elif news := news_of(self._generation, self._response):
            deliver([news])

    def _end(self, reason: FinishReason) -> None:
        self.active.complete[:] = True
        self._owner.finish(ChunkDelivery(self._generation, None, self._response.completion(reason)))


class JetStreamLoop(SlotLoop[_Channel]):
    """JetStream's Driver with the interface of `EngineLoop`. Serves only: `load_weights` raises."""

    def __init__(
        self,
        programs: SlotPrograms,
        params: Any,
        version: int,
        tokenizer: Tokenizer,
        serve: ServeConfig,
    ) -> None:
        super().__init__(programs, tokenizer, serve)
        self.version = version
        self._params = programs.put_on_mesh(params)
        self._adapter = JetStreamEngine(programs, self._params)
        self._driver: Any = None
        self._num_requests = self._num_tokens = 0
        self._adapter.on_failure = self._intake.fail

    def warmup(self) -> None:
        """Compile all programs. Call before `start`."""
        self._programs.warmup(self._params, self._programs.init_state())

    def start(self, num_requests: int = 1) -> None:
        """Start the Driver's threads, whatever `num_requests` is."""
        self._driver = orchestrator.Driver(
            prefill_engines=[self._adapter],
            generate_engines=[self._adapter],
            prefill_params=[self._params],
            generate_params=[self._params],
            interleaved_mode=True,
            jax_padding=False,
        )

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Do nothing: `submit` refuses every grammar."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        """Queue a request. See `EngineLoop.submit`.

        Raises ValueError for options that JetStream's Driver does not support.
        """
        if self._driver is None:
            raise EngineError(
                "the engine loop is not running; call start() before submit()",
                reason="not_running",
            )
        if adapter is not None:
            raise InvalidValue.unsupported(
                "adapter", f"adapter is {adapter}; must be None under JetStream's Driver"
            )
        if moves_logits(sampling) or sampling.top_logprobs or sampling.score_prompt:
            raise InvalidValue.unsupported(
                "serve.orchestrator",
                "JetStream's Driver does not support logit_bias, penalties, grammars, prompt "
                "log-probs or top log-probs; set serve.orchestrator=native",
            )
        ids = tuple(prompt_ids)
        response = self._respond(ids, sampling, time_limit)
        generation = Generation(self._cancel)
        channel = _Channel(self, generation, response)
        content = PromptText("prompt")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        content.prompt = Prompt(ids, sampling, seed)
        channel.active = orchestrator.ActiveRequest(
            max_tokens=response.limit,
            return_channel=channel,  # type: ignore[arg-type]
            prefill_content=content,
            is_client_side_tokenization=True,
        )
        self._intake.add(generation, channel, tenant)
        self._num_requests += 1
        self._driver.place_request_on_prefill_queue(channel.active)
        return generation

    def load_weights(self, params: Any, version: int) -> None:
        """Raise EngineError: JetStream's Driver reads the weights only when it starts."""
        raise EngineError.unsupported(
            "serve.orchestrator",
            f"weights version {version} cannot be loaded, because serve.orchestrator is "
            "jetstream; set serve.orchestrator=native to train",
        )

    def close(self) -> None:
        """Stop the Driver. Unfinished requests fail with EngineError."""
        self._intake.fail(
            EngineError("the engine was closed before the response was complete", reason="closed")
        )
        if self._driver is not None:
            self._driver.stop()

    def stats(self) -> dict[str, float]:
        """Return counters since the start and the number of open requests."""
        return {
            "serve/requests": float(self._num_requests),
            "serve/tokens_generated": float(self._num_tokens),
            "serve/open": float(len(self._intake)),
            "serve/compiles": float(self._programs.compiles),
        }

    def _cancel(self, generation: Generation) -> None:
        if channel := self._intake.get(generation):
            channel.cancelled = True

    def stalled_s(self) -> float:
        """Return the seconds in which the engine stood still. Called by the channels."""
        return self._programs.waited_s()

    def count_token(self) -> None:
        """Count one sampled token. Called by the channels."""
        self._num_tokens += 1

    def finish(self, delivery: ChunkDelivery) -> None:
        """Deliver the end of a request and close it. Called by the channels."""
        deliver([delivery])
        self._intake.remove([delivery.generation])
