"""Questions on a table of the generated worlds, each with its kind, wordings and query."""

import random
import sqlite3
from collections.abc import Iterator
from typing import Any

from generated_domains import Table, World, columns_of

Question = tuple[str, tuple[str, ...], str]  # kind, wordings, query


def all_questions(
    database: sqlite3.Connection, world: World, rng: random.Random
) -> Iterator[Question]:
    """Yield every question of the templates, with thresholds chosen by `rng`."""
    for table in (world.parent, *world.children):
        values = {
            name: [row[0] for row in database.execute(f"SELECT DISTINCT {name} FROM {table.name}")]
            for name, _ in columns_of(world, table)
        }
        yield from _about_rows(table)
        yield from _about_category(table, values)
        for number, _, _ in table.numbers:
            yield from _about_number(table, number)
            yield from _about_threshold(table, number, sorted(values[number]), rng)
            yield from _about_number_and_category(table, number, values)
        if table is not world.parent:
            owners = database.execute(f"SELECT {world.parent.label[0]} FROM {world.parent.name}")
            yield from _about_join(table, world.parent, [row[0] for row in owners])


def _about_rows(table: Table) -> Iterator[Question]:
    name, plural, label, kind = table.name, table.plural, table.label[0], _words(table.category[0])
    yield (
        "count",
        (
            f"How many {plural} are there?",
            f"Count the {plural}.",
            f"What is the number of {plural}?",
        ),
        f"SELECT count(*) FROM {name}",
    )
    yield (
        "list",
        (
            f"List the {_words(label)} of all {plural}.",
            f"What is the {_words(label)} of each {name}?",
            f"Show every {name}'s {_words(label)}.",
        ),
        f"SELECT {label} FROM {name}",
    )
    yield (
        "list",
        (
            f"List the {_words(label)} and {kind} of all {plural}.",
            f"What are the {_words(label)} and {kind} of each {name}?",
        ),
        f"SELECT {label}, {table.category[0]} FROM {name}",
    )


def _about_category(table: Table, values: dict[str, list[Any]]) -> Iterator[Question]:
    name, plural, label, column = table.name, table.plural, table.label[0], table.category[0]
    kind, of = _words(column), _words(label)
    for value in values[column]:
        yield (
            "count_where",
            (
                f"How many {plural} have {kind} {value}?",
                f"Count the {plural} with {kind} {value}.",
                f"What is the number of {plural} whose {kind} is {value}?",
            ),
            f"SELECT count(*) FROM {name} WHERE {column} = '{value}'",
        )
        yield (
            "filter",
            (
                f"List the {of} of {plural} with {kind} {value}.",
                f"Which {plural} have {kind} {value}? Give the {of}.",
                f"Show the {of} of every {name} whose {kind} is {value}.",
            ),
            f"SELECT {label} FROM {name} WHERE {column} = '{value}'",
        )
    yield (
        "distinct",
        (
            f"What are the different values of {kind} among {plural}?",
            f"List each {kind} of the {plural} once.",
        ),
        f"SELECT DISTINCT {column} FROM {name}",
    )
    yield (
        "count_distinct",
        (
            f"How many different values of {kind} do {plural} have?",
            f"Count the distinct {kind} values of {plural}.",
        ),
        f"SELECT count(DISTINCT {column}) FROM {name}",
    )
    yield (
        "group_count",
        (
            f"How many {plural} are there for each {kind}?",
            f"Show each {kind} and its number of {plural}.",
        ),
        f"SELECT {column}, count(*) FROM {name} GROUP BY {column}",
    )
    yield (
        "most_common",
        (
            f"Which {kind} is the most common among {plural}?",
            f"What {kind} do most {plural} have?",
        ),
        f"SELECT {column} FROM {name} GROUP BY {column} ORDER BY count(*) DESC LIMIT 1",
    )
    few = table.num_rows // len(values[column]) - 1
    yield (
        "having",
        (
            f"Which values of {kind} have more than {few} {plural}?",
            f"List each {kind} shared by more than {few} {plural}.",
        ),
        f"SELECT {column} FROM {name} GROUP BY {column} HAVING count(*) > {few}",
    )


_AGGREGATES = (
    ("avg", ("average", "mean")),
    ("max", ("highest", "maximum")),
    ("min", ("lowest", "minimum")),
    ("sum", ("total", "summed")),
)
_DIRECTIONS = ((" DESC", "highest", "descending"), ("", "lowest", "ascending"))


def _about_number(table: Table, number: str) -> Iterator[Question]:
    name, plural, label, amount = table.name, table.plural, table.label[0], _words(number)
    of = _words(label)
    for function, words in _AGGREGATES:
        yield (
            "aggregate",
            tuple(f"What is the {word} {amount} of all {plural}?" for word in words),
            f"SELECT {function}({number}) FROM {name}",
        )
    for suffix, extreme, direction in _DIRECTIONS:
        yield (
            "order",
            (
                f"List the {of} of {plural} by {amount}, {extreme} first.",
                f"Show the {of} of all {plural} in {direction} order of {amount}.",
            ),
            f"SELECT {label} FROM {name} ORDER BY {number}{suffix}",
        )
        yield (
            "superlative",
            (
                f"Which {name} has the {extreme} {amount}? Give the {of}.",
                f"What is the {of} of the {name} with the {extreme} {amount}?",
            ),
            f"SELECT {label} FROM {name} ORDER BY {number}{suffix} LIMIT 1",
        )
        yield (
            "top",
            (
                f"List the {of} of the 3 {plural} with the {extreme} {amount}.",
                f"Which 3 {plural} have the {extreme} {amount}? Give the {of}.",
            ),
            f"SELECT {label} FROM {name} ORDER BY {number}{suffix} LIMIT 3",
        )
    yield (
        "above_average",
        (
            f"List the {of} of {plural} with {amount} above the average.",
            f"Which {plural} have more than the average {amount}? Give the {of}.",
        ),
        f"SELECT {label} FROM {name} WHERE {number} > (SELECT avg({number}) FROM {name})",
    )


def _about_threshold(
    table: Table, number: str, values: list[int], rng: random.Random
) -> Iterator[Question]:
    name, plural, label, amount = table.name, table.plural, table.label[0], _words(number)
    for sign, words in ((">", ("above", "greater than")), ("<", ("below", "less than"))):
        limit = values[rng.randrange(len(values) // 4, 3 * len(values) // 4)]
        yield (
            "filter_number",
            tuple(
                f"List the {_words(label)} of {plural} with {amount} {w} {limit}." for w in words
            ),
            f"SELECT {label} FROM {name} WHERE {number} {sign} {limit}",
        )
        limit = values[rng.randrange(len(values) // 4, 3 * len(values) // 4)]
        yield (
            "count_number",
            tuple(f"How many {plural} have {amount} {word} {limit}?" for word in words),
            f"SELECT count(*) FROM {name} WHERE {number} {sign} {limit}",
        )


def _about_number_and_category(
    table: Table, number: str, values: dict[str, list[Any]]
) -> Iterator[Question]:
    name, plural, column, amount = table.name, table.plural, table.category[0], _words(number)
    for function, words in _AGGREGATES:
        yield (
            "group_aggregate",
            tuple(
                f"What is the {w} {amount} of {plural} for each {_words(column)}?" for w in words
            ),
            f"SELECT {column}, {function}({number}) FROM {name} GROUP BY {column}",
        )
        for value in values[column]:
            yield (
                "aggregate_where",
                tuple(
                    f"What is the {word} {amount} of {plural} with {_words(column)} {value}?"
                    for word in words
                ),
                f"SELECT {function}({number}) FROM {name} WHERE {column} = '{value}'",
            )


def _about_join(table: Table, parent: Table, owners: list[str]) -> Iterator[Question]:
    name, plural, label = table.name, table.plural, table.label[0]
    owner, owner_label = parent.name, parent.label[0]
    both = f"FROM {name} JOIN {owner} USING ({owner}_id)"
    yield (
        "join_list",
        (
            f"List the {_words(label)} of each {name} and its {owner}'s {_words(owner_label)}.",
            f"Show every {name}'s {_words(label)} with its {owner}'s {_words(owner_label)}.",
        ),
        f"SELECT {name}.{label}, {owner}.{owner_label} {both}",
    )
    yield (
        "join_group",
        (
            f"How many {plural} does each {owner} have? Give its {_words(owner_label)} too.",
            f"Show the {_words(owner_label)} of each {owner} that has {plural} and how many.",
        ),
        f"SELECT {owner}.{owner_label}, count(*) {both} GROUP BY {owner}.{owner_label}",
    )
    for value in owners:
        yield (
            "join_filter",
            (
                f"List the {_words(label)} of {plural} of the {owner} {value}.",
                f"Which {plural} belong to the {owner} {value}? Give the {_words(label)}.",
            ),
            f"SELECT {name}.{label} {both} WHERE {owner}.{owner_label} = '{value}'",
        )
        yield (
            "join_count",
            (
                f"How many {plural} belong to the {owner} {value}?",
                f"Count the {plural} of the {owner} {value}.",
            ),
            f"SELECT count(*) {both} WHERE {owner}.{owner_label} = '{value}'",
        )


def _words(column: str) -> str:
    return column.replace("_", " ")
