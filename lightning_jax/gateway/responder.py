"""Steps from a PolicyRequest to a running call: prompt ids, sampling, grammar, parser, record."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import PromptTooLong
from lightning_jax.engine.response import Chunk
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.dialects.base import ReplyContext
from lightning_jax.gateway.errors import ApiError, invalid, to_api_error
from lightning_jax.gateway.metrics import Meters
from lightning_jax.gateway.offload import Offload
from lightning_jax.gateway.prompt.grammar import check_size, grammar_of, guarantees_call, may_call
from lightning_jax.gateway.prompt.render import Generated, Rendered, check_length, render
from lightning_jax.gateway.prompt.tool_calls import PlainText, ToolCallParser
from lightning_jax.gateway.prompt.tool_formats import ToolFormat
from lightning_jax.gateway.record import CONTEXT_LENGTH_EXCEEDED, Call, Choice, PolicyLoop, complete
from lightning_jax.gateway.request import MAX_CHOICES, PolicyRequest
from lightning_jax.gateway.retries import Emit, RunningCall
from lightning_jax.gateway.routing import Route
from lightning_jax.gateway.sampling import sampling_params
from lightning_jax.gateway.sessions import AnsweredCall, OpenRollout
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.context import OpenSpan
from lightning_jax.traces.store import Store

NO_ROUTE = Route()
MAX_RECORDED = 4  # times serve.max_len; a longer prompt is refused and its ids are not recorded


@dataclass(frozen=True)
class Prepared:
    """Request with its rendered prompts. With a `refusal`, it is recorded and gets that error."""

    request: PolicyRequest
    prompts: tuple[Rendered, ...]
    refusal: PromptTooLong | None = None


@dataclass(frozen=True)
class Responder:
    """Model that answers requests, with its tokenizer, settings and store."""

    loop: PolicyLoop
    tokenizer: Tokenizer
    store: Store | None
    served_model: str
    serve: ServeConfig
    tool_format: ToolFormat
    meters: Meters
    offload: Offload

    async def prepare(
        self, request: PolicyRequest, rollout: OpenRollout | None, num_bytes: int
    ) -> Prepared:
        """Render a request whose body has `num_bytes` bytes. Raise ApiError if it is invalid."""
        work = max(num_bytes, _num_bytes(request))  # it may continue a long saved conversation
        try:
            prompts = await self.offload.run(work, self._render, request, rollout)
        except PromptTooLong as error:
            return Prepared(request, (Rendered((), 0, 0),), error)
        longest, max_len = max(len(prompt.token_ids) for prompt in prompts), self.serve.max_len
        if longest > MAX_RECORDED * max_len:  # the store would keep its ids forever
            error = PromptTooLong(
                f"the prompt has {longest} tokens; expected at most {max_len - 1}. Shorten it "
                "or raise serve.max_len."
            )
            return Prepared(request, (Rendered((), 0, 0),), error)
        return Prepared(request, tuple(prompts))

    def start(
        self,
        prepared: Prepared,
        rollout: OpenRollout | None,
        span: OpenSpan,
        route: Route = NO_ROUTE,
    ) -> RunningCall:
        """Start to answer a request, and record it in `span`.

        Raise ApiError if the request is invalid.
        """
        request, rendered = prepared.request, prepared.prompts
        self._check_room(request, rollout)
        breaks = sum(prompt.breaks for prompt in rendered)
        self.meters.count("prefix_breaks", breaks)
        check_size(request, self.serve.max_grammar_kib)
        grammar = grammar_of(request, self.tool_format, self.tokenizer)
        rooms = tuple(self.serve.max_len - len(prompt.token_ids) for prompt in rendered)
        sampling = sampling_params(
            request,
            rollout,
            rooms,
            grammar,
            max_logit_biases=self.serve.max_logit_biases,
            max_stop_chars=self.serve.max_stop_chars,
        )
        prompts = [prompt for prompt in rendered for _ in range(request.num_choices)]
        chat = request.messages is not None
        token = secrets.token_hex(12)
        call = Call(
            call_id=request.id_prefix + token,
            dialect=request.dialect,
            operation=attributes.CHAT if chat else attributes.TEXT_COMPLETION,
            choices=tuple(
                Choice(prompt.token_ids, how) for prompt, how in zip(prompts, sampling, strict=True)
            ),
            policy=request.model,
            served_model=self.served_model,
            agent=request.agent,
            rollout_id=rollout.settings.rollout_id if rollout else None,
            timeout_s=rollout.settings.call_timeout_s if rollout else None,
            prefix_breaks=breaks,
            span=span,
            role=route.role,
            answered_by=route.answered_by,
            adapter=route.adapter,
            guarantees_call=guarantees_call(request),
            refusal=prepared.refusal,
        )

        async def work(accept: Callable[[], None], emit: Emit) -> tuple[Answer, ...]:
            return await self._work(request, rendered[0], call, rollout, accept, emit)

        context = ReplyContext(
            token,
            int(time.time()),
            tuple(choice.prompt_ids for choice in call.choices),
            self.tokenizer,
            request.num_choices,
        )
        running = RunningCall(work, context)
        if rollout:
            rollout.began(running, len(call.choices))
        return running

    def _check_room(self, request: PolicyRequest, rollout: OpenRollout | None) -> None:
        """Raise ApiError if the call asks for more responses than can be in flight."""
        number = len(request.prompts or ("",)) * request.num_choices
        room = self.loop.num_slots + self.serve.max_queue
        limits = {"serve.slots + serve.max_queue": room}
        if rollout:
            limits["serve.max_choices_per_rollout"] = rollout.limits.max_choices_per_rollout
        for name, limit in limits.items():
            if number > limit:
                raise invalid(
                    f"n is {request.num_choices} and the call asks for {number} responses; "
                    f"expected at most {limit} ({name}).",
                    "n",
                    reason="too_many",
                    key=name,
                )
        if rollout:
            rollout.check_room(number)

    def count_tokens(self, request: PolicyRequest, rollout: OpenRollout | None) -> int:
        """Return the number of tokens in the request's prompts. Raise ApiError if it is invalid."""
        try:
            return sum(len(prompt.token_ids) for prompt in self._render(request, rollout))
        except PromptTooLong as error:
            raise ApiError(400, CONTEXT_LENGTH_EXCEEDED, str(error), param="messages") from error

    async def _work(
        self,
        request: PolicyRequest,
        rendered: Rendered,
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
            return {attributes.MALFORMED_TOOL_CALLS: malformed} if malformed else {}

        with _blame(rollout, self.loop.num_slots):
            completions = await complete(
                call,
                self.loop,
                self.store,
                on_accept=on_accept,
                on_chunk=on_chunk,
                on_done=on_done,
            )
        if rollout:
            where = call.span.trace_id, call.span.span_id
            rollout.answered[call.call_id] = AnsweredCall(call.call_id, *where, len(call.choices))
        answers = tuple(
            builder.answer(choice.prompt_ids, completion)
            for builder, choice, completion in zip(builders, call.choices, completions, strict=True)
        )
        malformed = sum(parser.malformed for parser in parsers)
        self.meters.count("malformed_tool_calls", malformed)
        self.meters.answered(call.dialect, answers)
        if rollout:
            rollout.num_tokens += _num_tokens(answers)
            if request.messages is not None:
                _remember(rollout, rendered, answers)
        return answers

    def _render(self, request: PolicyRequest, rollout: OpenRollout | None) -> list[Rendered]:
        if request.prompts is not None:
            if len(request.prompts) * request.num_choices > MAX_CHOICES:
                raise invalid(
                    f"prompt has {len(request.prompts)} entries with {request.num_choices} "
                    f"choices per entry; expected at most {MAX_CHOICES} responses per call.",
                    "prompt",
                    reason="too_many",
                )
            return [Rendered(self._prompt_ids(prompt), 0, 0) for prompt in request.prompts]
        assert request.messages is not None, "a request has messages or prompts"
        tools = [function.as_tool() for function in request.functions] or None
        memory = rollout.memory if rollout else None
        try:
            rendered = render(
                request.messages,
                tools,
                self.tokenizer,
                memory,
                self.tool_format,
                self.serve.max_len - 1,
            )
        except PromptTooLong:
            raise
        except ValueError as error:
            raise to_api_error(error, "messages") from error
        return [rendered]

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            check_length([prompt], self.tokenizer, self.serve.max_len - 1)
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            ids = prompt
        if not ids:
            raise invalid("prompt has no tokens; pass at least 1.", "prompt", reason="empty")
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


def _num_bytes(request: PolicyRequest) -> int:
    """Return roughly how many bytes the messages or prompts have, at least one each."""
    items = request.messages or request.prompts or ()
    texts = [item.get("content") if isinstance(item, dict) else item for item in items]
    sizes = [len(text) if isinstance(text, str | tuple) else 1 for text in texts]
    return sum(sizes) + 64 * len(items)


def _remember(rollout: OpenRollout, rendered: Rendered, answers: tuple[Answer, ...]) -> None:
    for answer in answers:
        sampled = answer.completion.token_ids
        generated = Generated(answer.prompt_ids, sampled, rendered.history, rendered.path)
        rollout.memory.add(answer.as_message(), generated)


@contextmanager
def _blame(rollout: OpenRollout | None, num_slots: int) -> Iterator[None]:
    """Blame the agent for a timeout if its rollout had more choices in flight than slots exist."""
    try:
        yield
    except ApiError as error:
        if rollout and error.code == "call_timeout":
            error.infrastructure = rollout.most_choices <= num_slots
        raise


def _num_tokens(answers: Sequence[Answer]) -> int:
    """Return the number of tokens in the answers and in their prompts, each prompt counted once."""
    prompts = {answer.prompt_ids for answer in answers}
    return sum(map(len, prompts)) + sum(len(answer.completion.token_ids) for answer in answers)
