"""Tests of Calc-X as published, the compact files and the generated problems."""

import gzip
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from calcx import load_calcx, plain_number
from coded import raises_coded
from generated_problems import generated_problems, solve

from lightning_jax.train.tasks.record_files import DatasetError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "question": "One?", "chain": "<result>1</result>", "result": "1", "source_ds": "x"},
    {"id": "b", "question": "Two thirds?", "chain": "", "result": "2/3 = around 0.666667"},
    {"id": "c", "question": "Which?", "chain": "", "result": "north", "source_ds": "x"},
    {"id": "d", "question": "How?", "chain": "", "result": None, "source_ds": "x"},
]


def load(root: Path | None, split: str = "train", **options: Any) -> Any:
    return load_calcx(root, split, "unused", **options)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra calcx is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    "name", ["data/train-00000-of-00002-9ab.parquet", "train.parquet", "train.jsonl"]
)
def test_published_layouts(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_lines
    write(tmp_path / name, ROWS)
    write(tmp_path / name.replace("train", "validation"), ROWS[:1])
    write(tmp_path / name.replace("train", "test"), [{"never": "read"}])
    tasks, left_out = load(tmp_path)
    assert [(t["id"], t["result"], t["source"]) for t in tasks] == [
        ("a", "1", "x"),
        ("b", "2/3", "unknown"),
    ]
    assert left_out == {"result_is_no_number": 2}
    assert [task["id"] for task in load(tmp_path, "dev")[0]] == ["a"]


def test_parquet_parts_are_read_in_order(tmp_path: Path) -> None:
    for part in (0, 1):
        write_parquet(
            tmp_path / "data" / f"train-0000{part}-of-00002.parquet", ROWS[part : part + 1]
        )
    assert [task["id"] for task in load(tmp_path)[0]] == ["a", "b"]


def test_the_compact_layout(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl.gz", [ROWS[0] | {"source": "gsm8k"}])
    write_lines(tmp_path / "dev.jsonl.gz", [ROWS[1] | {"source": "svamp"}])
    extra = [ROWS[0] | {"id": f"n{s}", "source": "asdiv", "split": s} for s in ("train", "dev")]
    write_lines(tmp_path / "asdiv_noncommercial.jsonl.gz", extra)
    assert [task["id"] for task in load(tmp_path)[0]] == ["a", "ntrain"]
    assert [task["id"] for task in load(tmp_path, "dev")[0]] == ["b", "ndev"]
    (tmp_path / "asdiv_noncommercial.jsonl.gz").unlink()
    assert [task["id"] for task in load(tmp_path)[0]] == ["a"]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [ROWS[0] | {"id": str(n), "source_ds": "xy"[n % 2]} for n in range(10)]
    write_lines(tmp_path / "train.jsonl", [*rows, ROWS[1] | {"source_ds": "x"}])
    tasks, left_out = load(tmp_path, sources=("x",), max_question_chars=5)
    assert [task["id"] for task in tasks] == ["0", "2", "4", "6", "8"]
    assert left_out == {"other_source": 5, "question_too_long": 1}


@pytest.mark.parametrize(
    "rows, reason, key, location",
    [
        ([{"id": "a", "result": "1"}], "invalid", "question", "train.jsonl:1"),
        ([{"id": "a", "question": "?"}], "missing", "result", "train.jsonl:1"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str, key: str, location: str
) -> None:
    write_lines(tmp_path / "train.jsonl", rows)
    with raises_coded(DatasetError, reason, key) as caught:
        load(tmp_path)
    assert location in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with raises_coded(DatasetError, "not_a_directory", "data.root"):
        load(tmp_path / "none")
    with raises_coded(DatasetError, "missing", "train"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n{")
    with raises_coded(DatasetError, "invalid", "id"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_text("[1]\n")
    with raises_coded(DatasetError, "wrong_type", f"{tmp_path}/train.jsonl:1"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"id"')
    with raises_coded(DatasetError, "malformed", f"{tmp_path}/train.jsonl:1"):
        load(tmp_path)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra calcx is not installed")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing else")
    with raises_coded(DatasetError, "unreadable", f"{tmp_path}/train.parquet"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text, number",
    [
        ("72", "72"),
        (" 0.5 ", "0.5"),
        ("2/3", "2/3"),
        ("2/3 = around 0.666667", "2/3"),
        ("1,234", "1,234"),
        ("3 1/2", "3 1/2"),
        ("25%", "25%"),
        ("$5", "$5"),
        (7, "7"),
        ("1/0", None),
        ("north", None),
        ("5 km", None),
        ("", None),
        (None, None),
    ],
)
def test_a_result_is_one_number(text: Any, number: str | None) -> None:
    assert plain_number(text) == number


@pytest.mark.parametrize("split", ["train", "dev"])
def test_generated_problems_are_right_and_always_the_same(split: str) -> None:
    tasks, left_out = load(None, split)
    assert tasks == generated_problems(split)
    assert left_out == {}
    assert len({task["question"] for task in tasks}) == len(tasks)
    for task in tasks:
        assert task["chain"].endswith(f"<result>{task['result']}</result>")
        shown = set(re.findall(r"\d+\.?\d*", task["question"]))
        assert Fraction(task["result"]) > 0
        for expression, output in re.findall(
            r'<gadget id="calculator">(.*?)</gadget>\n<output>(.*?)</output>', task["chain"]
        ):
            left, sign, right = expression.split()
            assert {left, right} <= {s.rstrip(".") for s in shown}, task
            shown.add(output)
            assert eval(f"Fraction('{left}') {sign} Fraction('{right}')") == Fraction(output)


def test_dev_problems_share_no_people_or_things_with_train() -> None:
    words = {
        split: {
            w for t in generated_problems(split) for w in re.findall(r"[A-Z]\w+", t["question"])
        }
        for split in ("train", "dev")
    }
    assert words["train"] & words["dev"] <= {"How", "In", "They", "Then"}


def test_a_solution_by_hand() -> None:
    chain, result = solve(("12 * 7", "{0} - 5", "{1} / 2"))
    assert result == "39.5"
    assert chain == (
        '<gadget id="calculator">12 * 7</gadget>\n<output>84</output>\n\n'
        '<gadget id="calculator">84 - 5</gadget>\n<output>79</output>\n\n'
        '<gadget id="calculator">79 / 2</gadget>\n<output>39.5</output>\n\n'
        "<result>39.5</result>"
    )
