"""Grammars that constrain a response: masks of allowed next tokens and forced tokens. No JAX.

A grammar is text in llguidance's dialect of Lark. The functions at the end of this module build it:
`grammar` returns a whole grammar, the others return expressions. An expression is plain text, so
`/[a-z]+/` and other pieces of Lark can be mixed in.

    grammar(sequence(literal("<tool_call>\\n"), json_schema(schema), literal("\\n</tool_call>")))

llguidance runs in separate processes (process.py), one per grammar. With llguidance 1.9.1
the first grammar below ends its process with a segmentation fault. The second allocates memory
until the allocation fails:

    start: %json {"const": -9223372036854775808}
    start: %json {"allOf": [{"type": "string", "pattern": "a0.*b"}, ..., {"pattern": "a39.*b"}]}

The first recurses forever: it negates the smallest int64 to write the number as a regular
expression. The second builds the automaton of an intersection, with a state for each set of
patterns.

A trial in a throwaway process and llguidance's own limits would not do. The limits refuse 18 such
patterns in 0.3 s, but 40 still take over 15 s of CPU time. They bound neither the memory of a state
nor the stack, and nobody catches what ends a process. A trial sees the first mask, but states are
built as responses reach them. So a later mask could still crash the trainer with all its rollouts.
"""

import asyncio
import copy
import hashlib
import json
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.grammar.child import WALL_FACTOR
from lightning_jax.engine.grammar.process import (
    GrammarError,
    GrammarProcess,
    GrammarServer,
    Matcher,
)
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.system.child_process import END_S

# The style of Python's json.dumps and of the chat templates. With a single spelling, punctuation
# is forced and a model cannot emit white space forever.
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}

# String formats that llguidance keeps. JSON Schema has any other one ignored, as an annotation.
KEPT_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid"),
    )
)
# Keywords of JSON Schema whose values are schemas by name, or data.
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("enum", "const", "default", "example", "examples")

MAX_VERDICTS = 4096  # grammars remembered as accepted or rejected


class GrammarCompiler:
    """Factory of matchers for one vocabulary. Every method may be called from any thread.

    `vocab_size` is the model's, if it differs from the tokenizer's. The first grammar starts a
    process that builds the tokenizer's tables, which takes 0.3 s for 49,152 tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int | None = None,
        *,
        serve: ServeConfig | None = None,
        max_cached: int = 32,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._serve = serve or ServeConfig()
        self._max_cached = max_cached
        self._server: GrammarServer | None = None
        self._processes: OrderedDict[bytes, GrammarProcess] = OrderedDict()
        self._verdicts: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._lock = threading.Lock()
        # One new grammar is tried at a time, and each owner has at most one in the queue.
        self._trials = ThreadPoolExecutor(1, "grammar")
        self._turns: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]
        self._turns = weakref.WeakValueDictionary()
        self.counts: Counter[str] = Counter()  # by "accepted" or the reason of a rejection

    @classmethod
    def shared(cls, tokenizer: Tokenizer, vocab_size: int, serve: ServeConfig) -> "GrammarCompiler":
        """Return the compiler for this tokenizer. Engines with it and the trainer share it."""
        limits = (serve.grammar_timeout_s, serve.grammar_memory_mib, serve.max_grammar_kib)
        key = (id(tokenizer), vocab_size, *limits)
        with _SHARED_LOCK:
            compiler = _SHARED.get(key)
            if compiler is None:
                compiler = _SHARED[key] = cls(tokenizer, vocab_size, serve=serve)
            return compiler

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Check that the grammar compiles, off the event loop, and remember the result.

        Owners, such as rollouts, take turns. Raises GrammarError if it does not compile, and
        GrammarProcessLost if the grammar processes do not start.
        """
        if not self._is_known(grammar):
            event_loop = asyncio.get_running_loop()
            turn = self._turns.setdefault((id(event_loop), owner), asyncio.Lock())
            async with turn:
                await event_loop.run_in_executor(self._trials, self.check, grammar)
        self.check(grammar)

    def check(self, grammar: str) -> None:
        """Check that the grammar compiles, like `prepare`, but block this thread."""
        if not self._is_known(grammar):
            verdict = self._try(grammar)
            with self._lock:
                self._verdicts[_digest(grammar)] = verdict
                self.counts[verdict.reason if verdict else "accepted"] += 1
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        with self._lock:
            verdict = self._verdicts.get(_digest(grammar))
        if verdict:
            raise GrammarError(str(verdict), verdict.reason)

    def open(self, grammar: str) -> "Matcher":
        """Return a matcher at the start of the grammar, without waiting for its first mask.

        Raises GrammarError, GrammarProcessLost, and OSError if no file descriptor is left.
        """
        digest = _digest(grammar)
        with self._lock:
            process = self._processes.pop(digest, None)
            if process is None or not process.alive:
                process = self._start_server().start(grammar)
            self._processes[digest] = process
            while len(self._processes) > self._max_cached:
                self._processes.popitem(last=False)  # ends with its last response
        # On a busy machine a reply takes longer than the process may compute for it.
        patience_s = WALL_FACTOR * self._serve.grammar_timeout_s + END_S
        return Matcher(process, self._vocab_size, patience_s)

    def _is_known(self, grammar: str) -> bool:
        with self._lock:
            return _digest(grammar) in self._verdicts

    def _try(self, grammar: str) -> GrammarError | None:
        # max_grammar_kib was checked for the schemas alone. The text around them is small.
        most, length = 2 * self._serve.max_grammar_kib * 1024, len(grammar)
        if length > most:
            return GrammarError(
                f"the grammar has {length} characters; the limit is {most} (twice "
                "serve.max_grammar_kib). Shorten the schema.",
                "size",
            )
        try:
            matcher = self.open(grammar)
            try:
                matcher.packed()
            finally:
                matcher.close()
        except GrammarError as error:
            with self._lock:
                self._processes.pop(_digest(grammar), None)
            # A copy has no traceback, whose frames would keep the process alive.
            return copy.copy(error)
        return None

    def _start_server(self) -> GrammarServer:
        if self._server is None:
            end_of_turn_id = self._tokenizer.end_of_turn_id
            if end_of_turn_id is None:
                raise GrammarError(
                    "this model's tokenizer has no end-of-turn token, so no grammar can end; set "
                    "eos_token in tokenizer_config.json",
                    "no_end_of_turn",
                )
            self._server = GrammarServer(self._tokenizer, end_of_turn_id, self._serve)
        return self._server


_SHARED: weakref.WeakValueDictionary[tuple[float, ...], GrammarCompiler]
_SHARED = weakref.WeakValueDictionary()
_SHARED_LOCK = threading.Lock()


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def literal(text: str, tokenizer: Tokenizer | None = None) -> str:
    """Return an expression for exactly this text.

    With a tokenizer, an added token in the text, such as Qwen's "<tool_call>", must be sampled as
    that token. Without one, a special token's text is ordinary characters.
    """
    parts, rest = [], text
    added = [i for i in tokenizer.encode(text) if i in tokenizer.added_ids] if tokenizer else []
    for token_id in added:
        assert tokenizer is not None, "without a tokenizer none is added"
        before, _, rest = rest.partition(tokenizer.decode([token_id], skip_special=False))
        parts += [_quoted(before)] * bool(before) + [f"<[{token_id}]>"]
    if rest or not parts:
        parts.append(_quoted(rest))
    return sequence(*parts)


def json_schema(schema: Mapping[str, Any] | None = None) -> str:
    """Return an expression for JSON that fits the schema, or for any object if it is None.

    The JSON is spelled like Python's json.dumps output. Properties come in the schema's order.
    """
    fields = {"type": "object"} if schema is None else _without_annotations(schema)
    return f"%json {json.dumps({**fields, 'x-guidance': _JSON_STYLE})}"


def _without_annotations(schema: Any) -> Any:
    """Return the schema without the formats that llguidance would refuse."""
    if isinstance(schema, list | tuple):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "format" and not (isinstance(value, str) and value in KEPT_FORMATS):
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            value = {name: _without_annotations(part) for name, part in value.items()}
        elif key not in _DATA:
            value = _without_annotations(value)
        plain[key] = value
    return plain


def sequence(*parts: str) -> str:
    """Return an expression for the parts in order."""
    return f"({' '.join(parts)})"


def one_of(*parts: str) -> str:
    """Return an expression for any one of the parts."""
    return f"({' | '.join(parts)})"


def repeat(part: str, separator: str = "", *, at_least: int = 1, at_most: int | None = None) -> str:
    """Return an expression for repetitions of `part`, with `separator` between them."""
    if at_most == 0:
        return _quoted("")
    least, most = max(at_least - 1, 0), "" if at_most is None else at_most - 1
    more = "" if at_most == 1 else f" ({separator} {part}){{{least},{most}}}"  # {0,0} is invalid
    some = f"({part}{more})"
    return some if at_least else f"{some}?"


def grammar(expression: str) -> str:
    """Return a grammar that accepts exactly the expression."""
    return f"start: {expression}"


def _quoted(text: str) -> str:
    return json.dumps(text)  # Lark strings use JSON's escapes
