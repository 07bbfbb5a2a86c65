"""Generated word problems, with solutions in Calc-X's markup.

There are six kinds of story, with numbers too large to calculate without a calculator. Dev has its
own people and things; the wordings are shared.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

SIZES = {"train": 1200, "dev": 240}
_PEOPLE = {
    "train": [
        "Ada",
        "Bruno",
        "Clara",
        "Dario",
        "Elena",
        "Felix",
        "Greta",
        "Hugo",
        "Ines",
        "Jonas",
        "Karin",
        "Leo",
        "Mara",
        "Nils",
    ],
    "dev": ["Olga", "Pavel", "Rosa", "Stefan", "Tilda", "Viktor"],
}
_THINGS = {
    "train": [
        "stamps",
        "marbles",
        "pencils",
        "shells",
        "coins",
        "stickers",
        "candles",
        "bottles",
        "tickets",
        "cards",
    ],
    "dev": ["buttons", "lanterns", "postcards", "beads"],
}
_BOXES = {"train": ["boxes", "bags", "crates", "shelves"], "dev": ["baskets", "cabinets"]}


@dataclass(frozen=True)
class Problem:
    """Question and the calculations that lead to its answer, one operation each.

    In an expression `{0}` is the result of the first calculation, `{1}` that of the second.
    """

    question: str
    expressions: tuple[str, ...]


@dataclass(frozen=True)
class Cast:
    """People and things of a story."""

    one: str
    other: str
    things: str
    boxes: str


def generated_problems(split: str) -> list[dict[str, Any]]:
    """Return the split's tasks: `id`, `source` (the kind), `question`, `chain` and `result`."""
    kinds = [sorted(_KINDS)[i % len(_KINDS)] for i in range(SIZES[split])]
    random.Random(f"order {split}").shuffle(kinds)  # so that an evenly spaced sample has all kinds
    return [_task(split, kind, i) for i, kind in enumerate(kinds)]


def _task(split: str, kind: str, index: int) -> dict[str, Any]:
    rng = random.Random(f"{split} {kind} {index}")
    one, other = rng.sample(_PEOPLE[split], 2)
    cast = Cast(one, other, rng.choice(_THINGS[split]), rng.choice(_BOXES[split]))
    problem = _KINDS[kind](rng, cast)
    chain, result = solve(problem.expressions)
    return {
        "id": f"generated_{split}_{index:04d}",
        "source": kind,
        "question": problem.question,
        "chain": chain,
        "result": result,
    }


def solve(expressions: tuple[str, ...]) -> tuple[str, str]:
    """Return (chain in Calc-X's markup, result) of calculations such as `12 * 7` and `{0} - 5`."""
    values: list[str] = []
    chain = []
    for expression in expressions:
        filled = expression.format(*values)
        values.append(_decimal(_operate(*filled.split())))
        chain.append(f'<gadget id="calculator">{filled}</gadget>\n<output>{values[-1]}</output>\n')
    return "\n".join([*chain, f"<result>{values[-1]}</result>"]), values[-1]


def _operate(left: str, sign: str, right: str) -> Fraction:
    a, b = Fraction(left), Fraction(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else str(float(value))


# ---- Kinds ---------------------------------------------------------------------------------------


def _change(rng: random.Random, cast: Cast) -> Problem:
    """Ask for a number of things after gains and losses."""
    start = rng.randint(200, 900)
    lines, expressions, last = [f"{cast.one} has {start} {cast.things}."], [], str(start)
    for step in range(rng.choice((1, 2, 2))):
        amount = rng.randint(15, 95)
        up = rng.random() < 0.5
        lines.append(rng.choice(_UPS if up else _DOWNS).format(n=amount, **vars(cast)))
        expressions.append(f"{last} {'+' if up else '-'} {amount}")
        last = f"{{{step}}}"
    ask = rng.choice(("How many {things} does {one} have now?", "How many {things} are there now?"))
    return Problem(" ".join([*lines, ask.format(**vars(cast))]), tuple(expressions))


_UPS = (
    "{one} buys {n} more.",
    "{other} brings {n} more {things}.",
    "A parcel with another {n} {things} arrives.",
)
_DOWNS = (
    "{one} gives {n} of them to {other}.",
    "{n} of the {things} get lost.",
    "{one} sells {n} of them at the market.",
)


def _rate(rng: random.Random, cast: Cast) -> Problem:
    """Ask for the content of boxes that hold equal numbers."""
    boxes, content, extra = rng.randint(12, 89), rng.randint(13, 78), rng.randint(15, 99)
    start = f"{cast.one} fills {boxes} {cast.boxes} with {content} {cast.things} each."
    total = f"{boxes} * {content}"
    lines, expressions = rng.choice(
        (
            (f"How many {cast.things} is that?", (total,)),
            (
                f"{extra} {cast.things} are left over. How many {cast.things} were there at first?",
                (total, f"{{0}} + {extra}"),
            ),
            (
                f"Then {cast.other} takes {extra} of the {cast.things} away. How many remain?",
                (total, f"{{0}} - {extra}"),
            ),
        )
    )
    return Problem(f"{start} {lines}", expressions)


def _share(rng: random.Random, cast: Cast) -> Problem:
    """Ask for equal shares of two people's things."""
    parts, share = rng.randint(6, 24), rng.randint(17, 68)
    total = parts * share
    if rng.random() < 0.4:
        question = (
            f"{cast.one} shares {total} {cast.things} equally among {parts} children. "
            "How many does each child get?"
        )
        return Problem(question, (f"{total} / {parts}",))
    first = rng.randint(total // 4, total // 2)
    question = (
        f"{cast.one} has {first} {cast.things} and {cast.other} has {total - first}. They put them "
        f"together and pack them into {parts} {cast.boxes}, the same number in each. "
        f"How many {cast.things} does each hold?"
    )
    return Problem(question, (f"{first} + {total - first}", f"{{0}} / {parts}"))


def _compare(rng: random.Random, cast: Cast) -> Problem:
    """Ask about one person who has more or fewer things than another."""
    first, difference = rng.randint(150, 800), rng.randint(17, 120)
    more = rng.random() < 0.5
    start = (
        f"{cast.one} collected {first} {cast.things}. {cast.other} collected {difference} "
        f"{'more' if more else 'fewer'} than {cast.one}."
    )
    second = f"{first} {'+' if more else '-'} {difference}"
    if rng.random() < 0.4:
        return Problem(f"{start} How many did {cast.other} collect?", (second,))
    return Problem(
        f"{start} How many {cast.things} did they collect together?", (second, f"{first} + {{0}}")
    )


def _price(rng: random.Random, cast: Cast) -> Problem:
    """Ask for the cost of things of one price, or for the change."""
    number, cents = rng.randint(12, 65), rng.randint(105, 995)
    price = _decimal(Fraction(cents, 100))
    start = f"{cast.one} buys {number} {cast.things} for ${price} each."
    total = f"{number} * {price}"
    if rng.random() < 0.5:
        return Problem(f"{start} How many dollars does that cost?", (total,))
    paid = rng.randint(7, 12) * 100
    question = f"{start} {cast.one} pays with ${paid}. How much money comes back?"
    return Problem(question, (total, f"{paid} - {{0}}"))


def _average(rng: random.Random, cast: Cast) -> Problem:
    """Ask for a mean over days."""
    days, mean = rng.randint(3, 9), rng.randint(31, 260)
    total = days * mean
    if rng.random() < 0.5:
        question = (
            f"In {days} days {cast.one} made {total} {cast.things}, the same number every day. "
            "How many is that a day?"
        )
        return Problem(question, (f"{total} / {days}",))
    more = rng.randint(12, 90)
    question = (
        f"In {days} days {cast.one} made {total} {cast.things}, the same number every day. "
        f"{cast.other} makes {more} a day more. How many {cast.things} does {cast.other} make a "
        "day?"
    )
    return Problem(question, (f"{total} / {days}", f"{{0}} + {more}"))


_KINDS: dict[str, Callable[[random.Random, Cast], Problem]] = {
    "average": _average,
    "change": _change,
    "compare": _compare,
    "price": _price,
    "rate": _rate,
    "share": _share,
}
