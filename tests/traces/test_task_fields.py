"""Tests of the texts that are kept of a task."""

from lightning_jax.traces.rows import MAX_FIELD_CHARS, MAX_FIELDS, MAX_NAME_CHARS, shorten_task


def test_long_texts_and_many_fields_are_cut() -> None:
    fields = shorten_task({"id": "t", "paper": "x" * 5000, "answer": "yes"})
    assert fields["paper"].count("x") == MAX_FIELD_CHARS and "3,000" in fields["paper"]
    assert fields["answer"] == "yes" and "id" not in fields
    many = shorten_task({"id": "t"} | {f"f{i}": i for i in range(MAX_FIELDS + 7)})
    assert len(many) == MAX_FIELDS + 1 and many["..."].startswith("7 ")
    assert list(shorten_task({"n" * 1000: 1})) == ["n" * MAX_NAME_CHARS]


def test_values_that_are_no_json_are_written_too() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    fields = shorten_task({"set": {1}, "keys": {(1, 2): 3}, "cycle": cycle, "none": None})
    assert fields == {"set": '"{1}"', "keys": "<dict>", "cycle": "<list>", "none": "null"}
