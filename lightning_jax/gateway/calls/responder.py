"""Answer to a request: render its prompts, submit them to the engine, follow and record them."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.generation import EngineError, Generation, PromptTooLong
from lightning_jax.engine.grammar.compiler import GrammarError
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.calls.offload import Offload
from lightning_jax.gateway.calls.record import (
    CONTEXT_LENGTH_EXCEEDED,
    Call,
    SampledChoice,
    Unfit,
    error_of,
    write_spans,
)
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.calls.routing import Route
from lightning_jax.gateway.calls.sampling import sampling_params
from lightning_jax.gateway.dialects.base import ReplyContext
from lightning_jax.gateway.errors import ApiError, invalid, to_api_error
from lightning_jax.gateway.metrics import Meters
from lightning_jax.gateway.prompt.grammar import check_size, grammar_of, guarantees_call, may_call
from lightning_jax.gateway.prompt.render import Generated, Rendered, check_length, render_prompt
from lightning_jax.gateway.prompt.tool_calls import PlainText, ToolCallParser
from lightning_jax.gateway.prompt.tool_formats import ToolFormat, mark_ids, open_thought
from lightning_jax.gateway.request import MAX_CHOICES, PolicyRequest
from lightning_jax.gateway.sessions.open_rollouts import AnsweredCall, OpenRollout
from lightning_jax.gateway.sessions.running_calls import RunningCall
from lightning_jax.gateway.sessions.waits import Waits
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.system.clock import PausableClock
from lightning_jax.traces.context import OpenSpan, SpanSink

Writer = tuple[ToolCallParser | PlainText, AnswerBuilder]  # of one choice
STANDSTILL = 2  # times the limit of a response: an engine that has not ended it stands still
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

    engine: Engine | RemoteEngine
    tokenizer: Tokenizer
    store: SpanSink | None
    served_model: str
    serve: ServeConfig
    tool_format: ToolFormat
    meters: Meters
    offload: Offload
    pauses: PausableClock

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
            error = PromptTooLong(longest, max_len)
            return Prepared(request, (Rendered((), 0, 0),), error)
        return Prepared(request, tuple(prompts))

    def start(
        self,
        prepared: Prepared,
        rollout: OpenRollout | None,
        span: OpenSpan,
        route: Route,
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
            shown_ids=self._shown_ids(request),
            max_logit_biases=self.serve.max_logit_biases,
            max_stop_chars=self.serve.max_stop_chars,
        )
        prompts = [prompt for prompt in rendered for _ in range(request.num_choices)]
        token = secrets.token_hex(12)
        call = Call(
            call_id=request.id_prefix + token,
            request=request,
            choices=tuple(
                SampledChoice(prompt.token_ids, how)
                for prompt, how in zip(prompts, sampling, strict=True)
            ),
            served_model=self.served_model,
            rollout_id=rollout.settings.rollout_id if rollout else None,
            timeout_s=rollout.settings.call_timeout_s if rollout else None,
            prefix_breaks=breaks,
            span=span,
            route=route,
            refusal=prepared.refusal,
        )
        context = ReplyContext(
            token,
            int(time.time()),
            tuple(choice.prompt_ids for choice in call.choices),
            self.tokenizer,
            request.num_choices,
        )
        running = RunningCall(partial(self._respond, call, rendered[0], rollout), context)
        if rollout:
            rollout.began(running, len(call.choices))
        return running

    def _check_room(self, request: PolicyRequest, rollout: OpenRollout | None) -> None:
        """Raise ApiError if the call asks for more responses than can be in flight."""
        number = len(request.prompts or ("",)) * request.num_choices
        room = self.engine.num_slots + self.serve.max_queue
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

    async def _respond(
        self, call: Call, rendered: Rendered, rollout: OpenRollout | None, running: RunningCall
    ) -> tuple[Answer, ...]:
        """Return one answer per choice, once the call is recorded.

        The call is recorded however it ends. Raise ApiError if it fails.
        """
        count = len(call.choices)
        writers = [
            (self._parser(call.request, choice.prompt_ids), AnswerBuilder(index))
            for index, choice in enumerate(call.choices)
        ]
        waits = rollout.waits if rollout else Waits(self.pauses.now_s)
        try:
            completions = await self._generate(call, writers, running, waits)
        except (Exception, asyncio.CancelledError) as error:
            failure = error_of(error, call)
            await write_spans(self.store, call.rollout_id, call.failed(error, failure))
            if failure is None:
                raise
            if rollout and failure.code == "call_timeout":
                # Its agent's fault if it had more choices in flight than there are slots.
                failure.infrastructure = rollout.most_choices <= self.engine.num_slots
            raise failure from error
        for parser, builder in writers:
            if rest := parser.finish():
                running.emit(builder.add(rest, None))
        malformed = sum(parser.malformed for parser, _ in writers)
        await write_spans(self.store, call.rollout_id, *call.ended(completions, malformed))
        if rollout:
            rollout.answered[call.call_id] = AnsweredCall(call.call_id, call.span, count)
        answers = tuple(
            builder.answer(choice.prompt_ids, completion)
            for (_, builder), choice, completion in zip(
                writers, call.choices, completions, strict=True
            )
        )
        self.meters.count("malformed_tool_calls", malformed)
        self.meters.count("late_responses", sum(c.is_late for c in completions))
        self.meters.answered(call.request.dialect, answers)
        if rollout:
            rollout.num_tokens += _num_tokens(answers)
            if call.request.messages is not None:
                _remember(rollout, rendered, answers)
        return answers

    async def _generate(
        self, call: Call, writers: Sequence[Writer], running: RunningCall, waits: Waits
    ) -> tuple[Completion, ...]:
        """Return the engine's completions. Cancel all generations if anything fails.

        Each response may wait for `call.timeout_s`, and then decode for as long. A response that
        decodes for longer ends as "length". Raise TimeoutError for one that waits for longer, or
        that the engine does not end.
        """
        task, timeout_s = running.task, call.timeout_s
        limits = [TimeLimit(timeout_s, self.pauses.now_s) for _ in call.choices]

        async def follow(generation: Generation, limit: TimeLimit, writer: Writer) -> Completion:
            parser, builder = writer
            async with self.pauses.timeout(timeout_s):
                chunk = await anext(generation, None)
            waits.begin(limit, task)
            async with self.pauses.timeout(timeout_s and STANDSTILL * timeout_s):
                while chunk is not None:
                    running.emit(builder.add(parser.push(chunk.text), chunk))
                    chunk = await anext(generation, None)
                completion = await generation.result()
            waits.remove([limit])
            return _checked(completion)

        generations: list[Generation] = []
        waits.add(limits)
        try:
            if call.refusal:
                raise call.refusal
            async with self.pauses.timeout(timeout_s):
                for grammar in {choice.sampling.grammar for choice in call.choices}:
                    if grammar is not None:
                        await self.engine.prepare(grammar, call.rollout_id or "")
            for choice, limit in zip(call.choices, limits, strict=True):
                generations.append(self._submit(choice, call, limit))
            running.accept()
            return tuple(await asyncio.gather(*map(follow, generations, limits, writers)))
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        finally:
            waits.remove(limits)

    def _submit(self, choice: SampledChoice, call: Call, limit: TimeLimit) -> Generation:
        policy, tenant = call.route.policy, call.rollout_id
        assert policy is not None, "the call has been checked"
        try:
            return self.engine.submit(
                choice.prompt_ids, choice.sampling, policy, tenant, limit, call.call_id
            )
        except (PromptTooLong, GrammarError):
            raise
        except ValueError as error:
            raise Unfit(str(error)) from error

    def _render(self, request: PolicyRequest, rollout: OpenRollout | None) -> list[Rendered]:
        if request.prompts is not None:
            if len(request.prompts) * request.num_choices > MAX_CHOICES:
                raise invalid(
                    f"prompt has {len(request.prompts)} entries with {request.num_choices} "
                    f"choices per entry; expected at most {MAX_CHOICES} responses per call.",
                    "prompt",
                    reason="too_many",
                )
            adds = request.add_special_tokens
            return [Rendered(self._prompt_ids(prompt, adds), 0, 0) for prompt in request.prompts]
        assert request.messages is not None, "a request has messages or prompts"
        tools = [function.as_tool() for function in request.functions] or None
        memory = rollout.memory if rollout else None
        try:
            rendered = render_prompt(
                request.messages,
                tools,
                self.tokenizer,
                memory,
                self.tool_format,
                self.serve.max_len,
                request.chat_template_kwargs,
            )
        except PromptTooLong:
            raise
        except ValueError as error:
            raise to_api_error(error, "messages") from error
        return [rendered]

    def _prompt_ids(self, prompt: str | tuple[int, ...], adds_special: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            check_length([prompt], self.tokenizer, self.serve.max_len)
            encode = self.tokenizer.encode_text if adds_special else self.tokenizer.encode
            ids = tuple(encode(prompt))
        else:
            ids = prompt
        if not ids:
            raise invalid("prompt has no tokens; pass at least 1.", "prompt", reason="empty")
        return ids

    def _shown_ids(self, request: PolicyRequest) -> tuple[int, ...]:
        if request.messages is None:
            return ()
        return mark_ids(self.tool_format if may_call(request) else None, self.tokenizer)

    def _parser(
        self, request: PolicyRequest, prompt_ids: tuple[int, ...]
    ) -> ToolCallParser | PlainText:
        if not may_call(request):
            return PlainText()
        is_free = request.output_schema is None  # else a grammar allows no thoughts, and all marks
        return ToolCallParser(
            self.tool_format,
            guaranteed=guarantees_call(request),
            offered={function.name for function in request.functions},
            allowed=request.tool_choice.names or None,
            at_most=None if request.parallel_tool_calls else 1,
            thought_end=open_thought(prompt_ids, self.tokenizer) if is_free else "",
            unmarked=is_free,
        )


def _checked(completion: Completion) -> Completion:
    """Return the completion. Raise the error that ended it early."""
    if completion.finish_reason == "error":
        raise GrammarError(
            "the schema cannot be satisfied (see the server log); pass a smaller schema or remove "
            "its contradictions.",
            "unfinished",
        )
    if completion.finish_reason == "cancelled":
        raise EngineError("the generation was cancelled; send the call again.")
    return completion


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


def _num_tokens(answers: Sequence[Answer]) -> int:
    """Return the number of tokens in the answers and in their prompts, each prompt counted once."""
    prompts = {answer.prompt_ids for answer in answers}
    return sum(map(len, prompts)) + sum(len(answer.completion.token_ids) for answer in answers)
