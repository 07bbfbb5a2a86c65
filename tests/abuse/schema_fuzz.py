"""Random JSON schemas from a seed, most of them hostile to a grammar compiler."""

import random
import string
from collections.abc import Callable
from typing import Any

Schema = Any

INTEGERS = (
    *(0, 1, -1, 7, 10**6, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), -(2**63) + 1),
    *(2**63, 2**64, -(2**64), 10**30),
)
FLOATS = (0.0, -0.0, 0.1, 1e-7, 1e-300, 5e-324, 1e22, 1.7976931348623157e308, -1e308, 3.5)
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
    *("uuid", "regex", "json-pointer", "unknown"),
)


class SchemaFuzzer:
    """Generator of schemas up to a depth. The same seed gives the same schemas."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 4) -> Schema:
        """Return a random schema of any kind."""
        makers: list[Callable[[int], Schema]] = [
            *(self._constant, self._number, self._string, self._typed, self._odd),
        ]
        if depth > 0:
            makers += [self._object, self._array, self._combined, self._combined, self._recursive]
            makers += [self._many]
        return self._random.choice(makers)(depth - 1)

    def number(self) -> int | float:
        pick = self._random
        found = pick.choice(
            (*INTEGERS, *FLOATS, pick.randint(-(2**70), 2**70), pick.uniform(-1e9, 1e9))
        )
        return -found if pick.random() < 0.2 else found

    def size(self) -> int:
        return self._random.choice((0, 1, 2, 3, 10, 100, 1000, 10_000, 2**20, 2**31, 2**63))

    def pattern(self, depth: int = 4) -> str:
        """Return a regular expression, sometimes a broken one."""
        pick = self._random
        if depth == 0 or pick.random() < 0.25:
            return pick.choice(
                (
                    *("a", "b", "0", ".", r"\d", r"\w", r"\s", r"\S", "[a-z]", "[^a]", "é", "😀"),
                    *(r"\p{L}", r"\b", "^", "$", "(?=a)", "(?!b)", r"\1", "(?i)a", "[", "a|b"),
                    *(".*", ".+", "x{1,9}", "(a|b)*"),
                )
            )
        inner = self.pattern(depth - 1)
        low = pick.choice((0, 1, 2, 5, 50, 500))
        return pick.choice(
            (
                f"({inner})*",
                f"({inner})+",
                f"({inner})?",
                f"({inner}){{{low},{low + pick.choice((0, 1, 10, 1000))}}}",
                f"({inner}){{{low},}}",
                f"{inner}|{self.pattern(depth - 1)}",
                f"{inner}.*{self.pattern(depth - 1)}",
                f"{inner}{self.pattern(depth - 1)}",
                f"^{inner}$",
                f"[^{string.ascii_letters[: pick.randint(1, 50)]}]{inner}",
            )
        )

    def _constant(self, _: int) -> Schema:
        pick = self._random
        value: Any = pick.choice(
            (
                self.number(),
                "x" * pick.choice((0, 1, 1000)),
                "\ud800\udc00\x00\x7f",
                None,
                True,
                [1, [2, []]],
                {"a": {"b": self.number()}},
                "<|im_end|>",
            )
        )
        if pick.random() < 0.5:
            return {"const": value}
        return {"enum": [value, *(self.number() for _ in range(pick.choice((0, 3, 300))))]}

    def _number(self, _: int) -> Schema:
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        chosen = self._random.sample(bounds, self._random.randint(0, 4))
        kind = self._random.choice(("integer", "number"))
        return {"type": kind, **{name: self.number() for name in chosen}}

    def _string(self, _: int) -> Schema:
        pick = self._random
        found: dict[str, Any] = {"type": "string"}
        if pick.random() < 0.6:
            found["pattern"] = self.pattern(pick.randint(0, 7))
        if pick.random() < 0.2:
            found["format"] = pick.choice(FORMATS)
        for name in ("minLength", "maxLength"):
            if pick.random() < 0.3:
                found[name] = self.size()
        return found

    def _typed(self, _: int) -> Schema:
        pick = self._random
        return {"type": pick.choice((*TYPES, "objct", list(pick.sample(TYPES, 3)), [], 5, None))}

    def _odd(self, _: int) -> Schema:
        return self._random.choice(
            (
                *(True, False, {}, [], "x", 3, None, {"not": {}}, {"$id": "x"}),
                *({"$ref": "#"}, {"$ref": "#/$defs/no"}, {"$ref": "http://x/y"}),
                {"type": "string", "not": {"const": "a"}},
                {"$schema": "http://json-schema.org/draft-04/schema#"},
                {"x-guidance": {"a": 1}},
                {"x-guidance": {"lenient": True, "coerce_one_of": True}},
            )
        )

    def _object(self, depth: int) -> Schema:
        pick = self._random
        names = [f"p{i}" for i in range(pick.choice((0, 1, 2, 5, 30)))]
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(min(depth, 1)) for name in names},
        }
        if pick.random() < 0.5:
            found["required"] = [*names[: pick.randint(0, 9)], *(["q"] * pick.randint(0, 1))]
        if pick.random() < 0.3:
            found["additionalProperties"] = self.schema(depth)
        if pick.random() < 0.2:
            found["patternProperties"] = {self.pattern(3): self.schema(depth)}
        for name in ("minProperties", "maxProperties"):
            if pick.random() < 0.1:
                found[name] = self.size()
        return found

    def _array(self, depth: int) -> Schema:
        pick = self._random
        found: dict[str, Any] = {"type": "array", "items": self.schema(depth)}
        if pick.random() < 0.3:
            found["prefixItems"] = [self.schema(min(depth, 1)) for _ in range(pick.randint(0, 9))]
        for name in ("minItems", "maxItems"):
            if pick.random() < 0.4:
                found[name] = self.size()
        if pick.random() < 0.1:
            found["uniqueItems"] = True
        return found

    def _combined(self, depth: int) -> Schema:
        pick = self._random
        parts = [self.schema(min(depth, 2)) for _ in range(pick.choice((1, 2, 3, 8)))]
        found: dict[str, Any] = {pick.choice(("allOf", "anyOf", "oneOf")): parts}
        if pick.random() < 0.2:
            found["type"] = pick.choice(TYPES)
        return found

    def _many(self, _: int) -> Schema:
        """Return many patterns or bounds that apply to the same string or number."""
        pick, number = self._random, self._random.choice((5, 20, 40, 80))
        make = pick.choice((self._string, self._number))
        return {pick.choice(("allOf", "allOf", "anyOf", "oneOf")): [make(0) for _ in range(number)]}

    def _recursive(self, depth: int) -> Schema:
        """Return a schema whose definitions refer to each other."""
        names = [f"d{i}" for i in range(self._random.choice((1, 2, 5)))]
        definitions = {}
        for name in names:
            other = {"$ref": f"#/$defs/{self._random.choice(names)}"}
            definitions[name] = self._random.choice(
                (
                    other,
                    {"allOf": [other, self.schema(min(depth, 1))]},
                    {"anyOf": [other, self.schema(min(depth, 1))]},
                    {"type": "object", "properties": {"a": other}, "required": ["a"]},
                    {"type": "array", "items": other},
                )
            )
        return {"$ref": f"#/$defs/{names[0]}", "$defs": definitions}
