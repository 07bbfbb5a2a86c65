"""From a PolicyRequest to a running call: prompt ids, sampling, constraint, parser, record."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from lightning_jax.config import ServeConfig
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.complete import Call, Choice, PolicyLoop, complete
from lightning_jax.gateway.dialects.base import ReplyContext
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.guarantee import check_size, grammar_of, guarantees_call, may_call
from lightning_jax.gateway.meters import Meters
from lightning_jax.gateway.render import Generated, Rendered, render
from lightning_jax.gateway.request import MAX_CHOICES, PolicyRequest
from lightning_jax.gateway.rollouts import OpenRollout
from lightning_jax.gateway.routing import Part
from lightning_jax.gateway.running import Emit, RunningCall
from lightning_jax.gateway.sampling import sampling_params
from lightning_jax.gateway.tool_calls import PlainText, ToolCallParser
from lightning_jax.gateway.tool_formats import ToolFormat
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.serve.response import Chunk
from lightning_jax.tracing import attributes as names

NO_PART = Part()


@dataclass(frozen=True)
class Policy:
    """What answers requests."""

    loop: PolicyLoop
    tokenizer: Tokenizer
    tracer: Tracer
    served_model: str
    serve: ServeConfig
    tool_format: ToolFormat
    meters: Meters

    def start(
        self,
        request: PolicyRequest,
        rollout: OpenRollout | None,
        headers: Mapping[str, str],
        part: Part = NO_PART,
    ) -> RunningCall:
        """Begins to answer. Raises ApiError where the request cannot work."""
        rendered = self._render(request, rollout)
        breaks = sum(prompt.breaks for prompt in rendered)
        self.meters.prefix_breaks.inc(breaks)
        if rollout:
            rollout.prefix_breaks += breaks
        check_size(request, self.serve.max_grammar_kib)
        grammar = grammar_of(request, self.tool_format, self.tokenizer)
        rooms = tuple(self.serve.max_len - len(prompt.token_ids) for prompt in rendered)
        sampling = sampling_params(
            request, rollout, rooms, grammar, max_logit_biases=self.serve.max_logit_biases
        )
        prompts = [prompt for prompt in rendered for _ in range(request.num_choices)]
        chat = request.messages is not None
        token = secrets.token_hex(12)
        call = Call(
            call_id=request.id_prefix + token,
            dialect=request.dialect,
            operation=names.CHAT if chat else names.TEXT_COMPLETION,
            choices=tuple(
                Choice(prompt.token_ids, how) for prompt, how in zip(prompts, sampling, strict=True)
            ),
            policy=request.model,
            served_model=self.served_model,
            agent=request.agent,
            rollout_id=rollout.settings.rollout_id if rollout else None,
            timeout_s=rollout.settings.call_timeout_s if rollout else None,
            prefix_breaks=breaks,
            headers=dict(headers),
            role=part.role,
            answered_by=part.answered_by,
            adapter=part.adapter,
            guarantees_call=guarantees_call(request),
        )

        async def work(accept: Callable[[], None], emit: Emit) -> tuple[Answer, ...]:
            return await self._work(request, rendered[0].history, call, rollout, accept, emit)

        context = ReplyContext(
            token,
            int(time.time()),
            tuple(choice.prompt_ids for choice in call.choices),
            self.tokenizer,
            request.num_choices,
        )
        return RunningCall(work, context)

    def count_tokens(self, request: PolicyRequest, rollout: OpenRollout | None) -> int:
        """Tokens of the request's prompts. Raises ApiError where the request cannot work."""
        return sum(len(prompt.token_ids) for prompt in self._render(request, rollout))

    async def _work(
        self,
        request: PolicyRequest,
        history: str,
        call: Call,
        rollout: OpenRollout | None,
        accept: Callable[[], None],
        emit: Emit,
    ) -> tuple[Answer, ...]:
        parsers = [self._parser(request) for _ in call.choices]
        builders = [AnswerBuilder(index) for index in range(len(call.choices))]

        async def on_accept() -> None:
            accept()

        async def on_chunk(index: int, chunk: Chunk) -> None:
            emit(builders[index].add(parsers[index].push(chunk.text), chunk))

        def on_done() -> dict[str, int]:
            for parser, builder in zip(parsers, builders, strict=True):
                if rest := parser.finish():
                    emit(builder.add(rest, None))
            malformed = sum(parser.malformed for parser in parsers)
            return {names.MALFORMED_TOOL_CALLS: malformed} if malformed else {}

        completions = await complete(
            call,
            self.loop,
            self.tracer,
            on_accept=on_accept,
            on_chunk=on_chunk,
            on_done=on_done,
        )
        answers = tuple(
            builder.answer(choice.prompt_ids, completion)
            for builder, choice, completion in zip(builders, call.choices, completions, strict=True)
        )
        malformed = sum(parser.malformed for parser in parsers)
        self.meters.malformed_tool_calls.inc(malformed)
        self.meters.answered(call.dialect, answers)
        if rollout:
            rollout.malformed_tool_calls += malformed
            if request.messages is not None:
                _remember(rollout, history, answers)
        return answers

    def _render(self, request: PolicyRequest, rollout: OpenRollout | None) -> list[Rendered]:
        if request.prompts is not None:
            if len(request.prompts) * request.num_choices > MAX_CHOICES:
                raise invalid(
                    f"prompt has {len(request.prompts)} entries of {request.num_choices} choices; "
                    f"expected at most {MAX_CHOICES} responses a call.",
                    "prompt",
                )
            return [Rendered(self._prompt_ids(prompt), 0, 0) for prompt in request.prompts]
        assert request.messages is not None, "a request has messages or prompts"
        tools = [function.as_tool() for function in request.functions] or None
        memory = rollout.memory if rollout else None
        try:
            rendered = render(request.messages, tools, self.tokenizer, memory, self.tool_format)
        except ValueError as error:
            raise invalid(str(error), "messages") from error
        return [rendered]

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("prompt has no tokens; expected at least 1.", "prompt")
        return ids

    def _parser(self, request: PolicyRequest) -> ToolCallParser | PlainText:
        if not may_call(request):
            return PlainText()
        return ToolCallParser(
            self.tool_format,
            guaranteed=guarantees_call(request),
            offered={function.name for function in request.functions},
            allowed=request.tool_choice.names or None,
            at_most=None if request.parallel_tool_calls else 1,
        )


def _remember(rollout: OpenRollout, history: str, answers: tuple[Answer, ...]) -> None:
    for answer in answers:
        generated = Generated(answer.prompt_ids, answer.completion.token_ids, history)
        rollout.memory.add(answer.as_message(), generated)
