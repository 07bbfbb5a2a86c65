"""Answer to a request: render its prompts, submit them to the engine, follow and record them."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.generation import EngineError, Generation, PromptTooLong
from lightning_jax.engine.grammar.compiler import GrammarError
from lightning_jax.engine.response import TimeLimit, rest_of
from lightning_jax.engine.types import Completion
from lightning_jax.gateway.answer import Answer, AnswerBuilder
from lightning_jax.gateway.calls.offload import Offload
from lightning_jax.gateway.calls.record import (
    CONTEXT_LENGTH_EXCEEDED,
    Call,
    IncomingCall,
    Recorder,
    SampledChoice,
    Unfit,
    error_of,
)
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.calls.sampling import sampling_params
from lightning_jax.gateway.errors import ApiError, invalid, to_api_error
from lightning_jax.gateway.prompt.grammar import check_size, grammar_of, guarantees_call, may_call
from lightning_jax.gateway.prompt.render import Rendered, check_length, render_prompt
from lightning_jax.gateway.prompt.tool_calls import PlainText, ToolCallParser
from lightning_jax.gateway.prompt.tool_formats import ToolFormat, mark_ids, open_thought
from lightning_jax.gateway.request import MAX_CHOICES, PolicyRequest
from lightning_jax.gateway.sessions.open_rollouts import AnsweredCall, OpenRollout
from lightning_jax.gateway.sessions.running_calls import RunningCall
from lightning_jax.gateway.sessions.waits import Waits
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.system.clock import PausableClock

Writer = tuple[ToolCallParser | PlainText, AnswerBuilder]  # of one choice
STANDSTILL = 2  # times the limit of a response: an engine that has not ended it stands still
MAX_RECORDED = 4  # times serve.max_len; a longer prompt is refused and its ids are not recorded


@dataclass(frozen=True)
class Responder:
    """Model that answers requests, with its tokenizer, settings and recorder."""

    engine: Engine | RemoteEngine
    tokenizer: Tokenizer
    recorder: Recorder
    served_model: str
    serve: ServeConfig
    tool_format: ToolFormat
    offload: Offload
    pauses: PausableClock

    def start(self, incoming: IncomingCall) -> RunningCall:
        """Start to render and answer a call."""
        return RunningCall(partial(self._answer, incoming))

    def count_tokens(self, request: PolicyRequest, rollout: OpenRollout | None) -> int:
        """Return the number of tokens in the request's prompts. Raise ApiError if it is invalid."""
        try:
            return sum(len(prompt.token_ids) for prompt in self._render(request, rollout))
        except PromptTooLong as error:
            raise ApiError(400, CONTEXT_LENGTH_EXCEEDED, str(error), param="messages") from error

    async def _answer(self, incoming: IncomingCall, running: RunningCall) -> tuple[Answer, ...]:
        """Return one answer per choice, once the call is recorded. Raise ApiError if it fails.

        A call that fails after `_begin` is recorded too.
        """
        request, rollout = incoming.request, incoming.rollout
        number = self._check_number(request, rollout)
        with rollout.responses(number) if rollout else nullcontext():
            call = self._begin(incoming, *await self._prompts(incoming))
            writers = [
                (self._parser(request, choice.prompt_ids), AnswerBuilder(index))
                for index, choice in enumerate(call.choices)
            ]
            waits = rollout.waits if rollout else Waits(self.pauses.now_s)
            try:
                completions = await self._generate(call, writers, running, waits)
            except (Exception, asyncio.CancelledError) as error:
                failure = error_of(error, call)
                await self.recorder.write(call.rollout_id, call.failed(error, failure))
                if failure is None:
                    raise
                if rollout and failure.code == CONTEXT_LENGTH_EXCEEDED:
                    rollout.num_refused += 1
                if rollout and failure.code == "call_timeout":
                    # Its agent's fault if it had more choices in flight than there are slots.
                    failure.infrastructure = rollout.most_choices <= self.engine.num_slots
                raise failure from error
            return await self._finish(call, completions, writers, running)

    def _check_number(self, request: PolicyRequest, rollout: OpenRollout | None) -> int:
        """Return the number of responses. Raise ApiError if so many can never be in flight."""
        number = len(request.prompts or ("",)) * request.num_choices
        if number > MAX_CHOICES:
            raise invalid(
                f"prompt has {len(request.prompts or ())} entries with {request.num_choices} "
                f"choices per entry; expected at most {MAX_CHOICES} responses per call.",
                "prompt",
                reason="too_many",
            )
        limits = {"serve.slots + serve.max_queue": self.engine.num_slots + self.serve.max_queue}
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
        return number

    async def _prompts(
        self, incoming: IncomingCall
    ) -> tuple[tuple[Rendered, ...], PromptTooLong | None]:
        """Return the rendered prompts, or an empty one and the error if a prompt is too long.

        A call with a prompt that is too long is recorded. Raise ApiError if the request is invalid.
        """
        request, rollout = incoming.request, incoming.rollout
        # It may continue a long saved conversation.
        num_bytes = max(incoming.num_bytes, _num_bytes(request))
        try:
            prompts = await self.offload.run(num_bytes, self._render, request, rollout)
            longest, max_len = max(len(p.token_ids) for p in prompts), self.serve.max_len
            if longest > MAX_RECORDED * max_len:  # the store would keep its ids forever
                raise PromptTooLong(longest, max_len)
        except PromptTooLong as error:
            return (Rendered((), 0, 0),), error
        return tuple(prompts), None

    def _begin(
        self,
        incoming: IncomingCall,
        rendered: tuple[Rendered, ...],
        refusal: PromptTooLong | None,
    ) -> Call:
        """Return the call with its choices and its span. Raise ApiError if it is invalid."""
        request, rollout = incoming.request, incoming.rollout
        check_size(request, self.serve.max_grammar_kib)
        prompts = [prompt.token_ids for prompt in rendered for _ in range(request.num_choices)]
        calls = self.tool_format if may_call(request) else None
        sampling = sampling_params(
            request,
            rollout,
            tuple(self.serve.max_len - len(ids) for ids in prompts),
            grammar_of(request, self.tool_format, self.tokenizer),
            shown_ids=mark_ids(calls, self.tokenizer) if request.messages is not None else (),
            max_logit_biases=self.serve.max_logit_biases,
            max_stop_chars=self.serve.max_stop_chars,
        )
        call = Call(
            token=secrets.token_hex(12),
            request=request,
            rollout=rollout,
            route=incoming.route,
            rendered=rendered,
            choices=tuple(map(SampledChoice, prompts, sampling)),
            served_model=self.served_model,
            span=self.recorder.begin(incoming.headers, rollout),
            refusal=refusal,
        )
        self.recorder.meters.count("prefix_breaks", call.prefix_breaks)
        return call

    async def _finish(
        self,
        call: Call,
        completions: tuple[Completion, ...],
        writers: Sequence[Writer],
        running: RunningCall,
    ) -> tuple[Answer, ...]:
        """Record the call and return its answers."""
        for parser, builder in writers:
            if rest := parser.finish():
                running.emit(builder.add(rest, None))
        malformed = sum(parser.malformed for parser, _ in writers)
        await self.recorder.write(call.rollout_id, *call.ended(completions, malformed))
        answers = tuple(
            builder.answer(choice.prompt_ids, completion)
            for (_, builder), choice, completion in zip(
                writers, call.choices, completions, strict=True
            )
        )
        meters = self.recorder.meters
        meters.count("malformed_tool_calls", malformed)
        meters.count("late_responses", sum(c.is_late for c in completions))
        meters.answered(call.request.dialect, answers)
        if call.rollout:
            answered = AnsweredCall(call.call_id, call.span, len(answers))
            call.rollout.remember(answered, answers, call.rendered[0])
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
            if call.request.stream:
                aiter(generation)  # asks for chunks from the first token on
            async with self.pauses.timeout(timeout_s):
                await generation.started()
            waits.begin(limit, task)
            writer[1].begin()
            async with self.pauses.timeout(timeout_s and STANDSTILL * timeout_s):
                completion = await _write(generation, call.request.stream, writer, running)
            waits.remove(limit)
            return completion

        generations: list[Generation] = []
        waits.add(*limits)
        try:
            if call.refusal:
                raise call.refusal
            async with self.pauses.timeout(timeout_s):
                for grammar in {choice.sampling.grammar for choice in call.choices}:
                    if grammar is not None:
                        await self.engine.prepare(grammar, call.rollout_id or "")
            for choice, limit in zip(call.choices, limits, strict=True):
                generations.append(self._submit(choice, call, limit))
            running.accept(call.reply_context(self.tokenizer))
            return tuple(await asyncio.gather(*map(follow, generations, limits, writers)))
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        finally:
            waits.remove(*limits)

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


async def _write(
    generation: Generation, is_stream: bool, writer: Writer, running: RunningCall
) -> Completion:
    """Emit the text as it grows if somebody reads it then, else at its end. Return it all."""
    parser, builder = writer
    if is_stream:
        async for chunk in generation:
            running.emit(builder.add(parser.push(chunk.text), chunk))
    completion = _checked(await generation.result())
    if not is_stream:
        running.emit(builder.add(parser.push(completion.text), rest_of(completion)))
    return completion


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
