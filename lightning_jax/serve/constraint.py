"""Grammars that a response must follow: which tokens may come next, and which one must. No JAX.

A grammar is text in llguidance's dialect of Lark. The functions at the end write it: each gives an
expression, `grammar` makes the whole of one. An expression is plain text, so `/[a-z]+/` and other
pieces of Lark may stand among them.

    grammar(sequence(literal("<tool_call>\\n"), json_schema(schema), literal("\\n</tool_call>")))
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Bool

from lightning_jax.models.tokenizer import Tokenizer

# As Python's json.dumps and the chat templates write it. With one spelling the punctuation is
# forced, and no model can go on with white space for ever.
_JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


class GrammarError(ValueError):
    """A grammar or JSON schema that cannot be followed."""


class GrammarCompiler:
    """Makes matchers for one vocabulary. Every method may be called from any thread.

    `vocab_size` is the model's, where it differs from the tokenizer's. The tokenizer's tables are
    made at the first grammar, which takes 0.3 s for 49,152 tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int | None = None, *, max_cached: int = 256
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._max_cached = max_cached
        self._tables: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> "Matcher":
        """A new matcher at the grammar's beginning. Raises GrammarError.

        A grammar is compiled once; those used last are kept.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = compiled
            while len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._tables is None:
            self._tables = _tables(self._tokenizer)
        compiled = llguidance.LLMatcher(self._tables, grammar, log_level=0)
        if compiled.is_error():
            raise GrammarError(
                f"the grammar does not compile: {_reason(compiled.get_error())}; expected a "
                "grammar or JSON schema that llguidance supports. Simplify it."
            )
        return compiled


class Matcher:
    """How far one response has come in its grammar. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._mask: Bool[np.ndarray, " V"] | None = None  # of the next token, once asked for
        self._forced: int | None = None

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """True for the tokens that may come next, at least one; the caller must not change it.

        Where the grammar fixes the text that follows, that is only the token with which the
        tokenizer itself would go on. Raises GrammarError if the grammar leads nowhere or is too
        complex here.
        """
        if self._mask is None:
            self._look()
            assert self._mask is not None, "looking sets the mask"
        return self._mask

    @property
    def forced(self) -> int | None:
        """The one token that is allowed; None if there is a choice. Raises as `allowed`."""
        self.allowed()
        return self._forced

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but the end-of-turn token may follow."""
        return self._matcher.is_stopped()

    def push(self, token_id: int) -> None:
        """Takes the token that was sampled. Raises GrammarError if it was not allowed."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(
                f"token {token_id} does not fit the grammar: {_reason(self._matcher.get_error())}; "
                "expected one that `allowed` shows."
            )
        self._mask = self._forced = None

    def _look(self) -> None:
        mask = np.zeros(self._vocab_size, bool)
        ahead = self._matcher.compute_ff_tokens()  # does not say that the end of turn is forced
        if ahead and ahead[0] < self._vocab_size:
            mask[ahead[0]] = True
        else:
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
            mask[: len(bits)] = bits
        if self._matcher.is_error() or not mask.any():
            reason = _reason(self._matcher.get_error()) or "no token may come next"
            raise GrammarError(
                f"the grammar cannot go on: {reason}; expected a grammar that every text it begins "
                "can finish. Simplify it."
            )
        self._mask = mask
        self._forced = int(mask.argmax()) if mask.sum() == 1 else None


class _Vocabulary:
    """What llguidance asks of a foreign tokenizer.

    It could read the tokenizer's JSON by itself, but would then split fixed text as if "<|im_end|>"
    in it meant the special token, which its own grammar refuses; so do strings of a schema.
    """

    def __init__(self, tokenizer: Tokenizer, end_of_turn_id: int) -> None:
        self._tokenizer = tokenizer
        self._from_json = llguidance.LLTokenizer(tokenizer.to_json(), eos_token=end_of_turn_id)
        self.tokens = [
            self._from_json.decode_bytes([token_id])
            for token_id in range(self._from_json.vocab_size)
        ]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id, self.bos_token_id = end_of_turn_id, None

    def __call__(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, special=False)
        if b"".join(self.tokens[token_id] for token_id in ids) == text.encode():
            return ids
        # The tokenizer changes the text, as by a space before its first word.
        return self._from_json.greedy_tokenize(text)


def _tables(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    end_of_turn_id = tokenizer.end_of_turn_id
    if end_of_turn_id is None:
        raise GrammarError(
            "this model's tokenizer has 0 end-of-turn tokens; expected one that ends what a "
            "grammar has finished. Set eos_token in tokenizer_config.json."
        )
    try:
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, end_of_turn_id))
        return llguidance.LLTokenizer(wrapper)
    except ValueError as error:
        raise GrammarError(
            f"this model's tokenizer cannot follow a grammar: {_reason(str(error))}; expected a "
            "byte-level or byte-fallback one. Use another model."
        ) from error


def _reason(message: str) -> str:
    """llguidance's message on one line, without its place in the text, the text and the state."""
    message = re.split(r"\n<state>|\n\s*\d+ \| ", message)[0]
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = re.sub(r"(regex parse error):.*\nerror: ", r"\1: ", message, flags=re.DOTALL)
    return " ".join(message.split()).rstrip(".")[:300]


def literal(text: str, tokenizer: Tokenizer | None = None) -> str:
    """Exactly this text.

    With a tokenizer, an added token in it, such as Qwen's "<tool_call>", must come as that token.
    Without one, a special token's text is ordinary characters.
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
    """JSON that fits the schema, or any object, spelled as Python's json.dumps does.

    Properties come in the schema's order.
    """
    settled = {"type": "object"} if schema is None else schema
    return f"%json {json.dumps({**settled, 'x-guidance': _JSON_STYLE})}"


def sequence(*parts: str) -> str:
    """One part after another."""
    return f"({' '.join(parts)})"


def one_of(*parts: str) -> str:
    """Any one of the parts."""
    return f"({' | '.join(parts)})"


def repeat(part: str, separator: str = "", *, at_least: int = 1, at_most: int | None = None) -> str:
    """The part again and again, with the separator, an expression too, between two of it."""
    if at_most == 0:
        return _quoted("")
    least, most = max(at_least - 1, 0), "" if at_most is None else at_most - 1
    more = "" if at_most == 1 else f" ({separator} {part}){{{least},{most}}}"  # {0,0} is refused
    some = f"({part}{more})"
    return some if at_least else f"{some}?"


def grammar(expression: str) -> str:
    """The grammar whose language is the expression's."""
    return f"start: {expression}"


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """The grammar of `json_schema`."""
    return grammar(json_schema(schema))


def _quoted(text: str) -> str:
    return json.dumps(text)  # Lark's strings have JSON's escapes
