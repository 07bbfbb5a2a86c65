"""Test that the generated pages are current, and that the tables behind them are complete."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lightning_jax.settings.loading import load_function
from lightning_jax.train.watch.curves import DESCRIPTIONS, describe, metric_descriptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_jax"
METRICS = metric_descriptions()
CODES = yaml.safe_load((PACKAGE / "gateway/error_codes.yaml").read_text())
REASONS = yaml.safe_load((PACKAGE / "rollouts/reasons.yaml").read_text())
METRIC = re.compile(r"(eval|rollout|train|serve|time)/[a-z][a-z0-9_]*")
# Gauges and totals of the server, which a row of metrics does not have, and prefixes.
NOT_IN_ROWS = re.compile(
    r"serve/(running|queue_depth|open|compiling|prefix_cache_\w+|prefill_tokens|prefix_hit_tokens"
    r"|decode_s|decode_bound_s)"
    r"|train/correction|\w+/\w+_"
)


def test_generated_pages_are_current() -> None:
    pages = load_function(f"{ROOT / 'docs/reference.py'}:pages")()
    assert len(pages) == 8
    old = [path for path, text in pages.items() if (ROOT / "docs" / path).read_text() != text]
    assert old == [], "run python docs/reference.py"


def test_every_metric_in_the_source_is_described() -> None:
    written = {text for text in _strings() if METRIC.fullmatch(text)}
    assert len(written) > 80
    assert {name for name in written if not NOT_IN_ROWS.fullmatch(name)} - set(METRICS) == set()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("warmup/entropy", "train/entropy"),
        ("eval/reward_mean/source=svamp", "eval/reward_mean"),
        ("train/grad_norm/policy=writer", "train/grad_norm"),
        ("rollout/agent_failure_value_error", "rollout/agent_failure_REASON"),
        ("rollout/agent_f1_mean", "rollout/agent_NAME_mean"),
        ("rollout/rule_broken_without_call", "rollout/rule_NAME_without_call"),
        ("rollout/dropped_call_timeout", "rollout/dropped_REASON"),
        ("audit/correlation/agent~length", "audit/correlation/NAME"),
    ],
)
def test_a_metric_of_a_part_has_the_description_of_the_whole(name: str, key: str) -> None:
    assert describe(name) == METRICS[key]


def test_unknown_metrics_have_no_description() -> None:
    assert describe("rollout/zzz") is None and describe("step") is None


def test_every_error_code_of_the_gateway_is_listed() -> None:
    codes = set()
    for call in _calls("gateway", {"ApiError", "_server_error", "_too_many", "invalid"}):
        kind = ast.unparse(call.func)
        index = {"_too_many": 0, "invalid": 2}.get(kind, 1)
        if len(call.args) > index and isinstance(code := call.args[index], ast.Constant):
            codes.add(str(code.value))
    assert len(codes) > 15 and codes - set().union(*CODES.values()) == set()


def test_every_reason_that_the_runner_gives_is_listed() -> None:
    given = {
        ast.literal_eval(call.args[0])
        for call in _calls("rollouts", {"failure"})
        if isinstance(call.args[0], ast.Constant)
    }
    program = ast.parse((PACKAGE / "rollouts/agents/program.py").read_text())
    given |= {node.name for node in program.body if isinstance(node, ast.ClassDef) and node.bases}
    given |= {code for status, texts in CODES.items() for code in texts if status >= 500}
    given.discard("not_open")  # refuses to begin a rollout
    assert len(given) > 10 and given - set(REASONS) == set()


def _strings() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _calls(room: str, names: set[str]) -> Iterator[ast.Call]:
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield node


def test_the_page_has_all_areas_of_metrics():
    areas = yaml.safe_load(DESCRIPTIONS.read_text())["areas"]
    assert {name.partition("/")[0] for name in METRICS} == {*areas}
