"""Tests of grammar processes: a limit ends only the process that exceeds it."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import llguidance
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import EngineError
from lightning_jax.engine.grammar import child as grammar_child
from lightning_jax.engine.grammar.compiler import (
    GrammarCompiler,
    GrammarError,
    grammar,
    json_schema,
)
from lightning_jax.engine.grammar.process import GrammarProcess, GrammarProcessLost, Matcher
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.testing.tiny import tiny_tokenizer

SERVE = ServeConfig(slots=4, max_len=96, prefill_buckets=(8, 32), max_queue=8)
TINY = tiny_tokenizer()
CRASH = grammar(json_schema({"const": -(2**63)}))
HUGE = grammar(
    json_schema({"allOf": [{"type": "string", "pattern": f"a{index}.*b"} for index in range(40)]})
)


def open_matcher(compiler: GrammarCompiler, grammar_text: str) -> Matcher:
    compiler.check(grammar_text)
    return compiler.open(grammar_text)


def refusal(compiler: GrammarCompiler, grammar: str) -> tuple[str, str]:
    """Return the reason and the message of the grammar's rejection."""
    with pytest.raises(GrammarError) as raised:
        open_matcher(compiler, grammar)
    return raised.value.reason, str(raised.value)


def children_of(pid: int) -> set[int]:
    """Return the ids of the process's children."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_crash_ends_one_grammar_only() -> None:
    compiler = GrammarCompiler(TINY)
    matcher = open_matcher(compiler, 'start: "ab"')
    assert refusal(compiler, CRASH)[0] == "crash"
    assert refusal(compiler, CRASH)[0] == "crash"
    assert compiler.counts == {"accepted": 1, "crash": 1}  # the verdict is remembered
    for token_id in TINY.encode("ab"):
        assert matcher.forced == token_id
        matcher.push(token_id)
    assert matcher.forced in TINY.eos_ids


def test_time_limit_ends_compilation() -> None:
    compiler = GrammarCompiler(TINY, serve=ServeConfig(grammar_timeout_s=0.2))
    reason, text = refusal(compiler, HUGE)
    assert reason == "time" and "serve.grammar_timeout_s" in text


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="the limit of memory is Linux's")
def test_memory_limit_ends_compilation() -> None:
    serve = ServeConfig(grammar_timeout_s=60.0, grammar_memory_mib=64.0)
    compiler = GrammarCompiler(TINY, serve=serve)
    reason, text = refusal(compiler, HUGE)
    assert reason == "memory" and "serve.grammar_memory_mib" in text


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (signal.SIGPROF, "time"),
        (signal.SIGABRT, "memory"),
        (signal.SIGSEGV, "crash"),
        (signal.SIGALRM, None),  # a busy machine
        (signal.SIGKILL, None),  # the kernel, when the machine's memory runs out
        (signal.SIGTERM, None),
        (0, None),  # the process exited without a report
    ],
)
def test_only_what_the_grammar_does_is_its_fault(status: int, reason: str | None) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.send(bytes([status]))
        found = GrammarProcess(ours, SERVE).why()
    if reason is None:
        assert isinstance(found, GrammarProcessLost)
    else:
        assert isinstance(found, GrammarError) and found.reason == reason


def test_long_grammar_starts_no_process() -> None:
    compiler = GrammarCompiler(TINY, serve=ServeConfig(max_grammar_kib=1))
    reason, text = refusal(compiler, grammar(json_schema({"const": "x" * 2048})))
    assert reason == "size" and "serve.max_grammar_kib" in text
    assert compiler._server is None


def test_rejected_grammars_keep_no_process() -> None:
    """Not even until the garbage collector runs: there may be thousands."""
    compiler = GrammarCompiler(TINY)
    gc.disable()
    try:
        for number in range(4):
            assert refusal(compiler, f'start: "{number}" & /x/')[0] == "invalid"
        server = compiler._server
        assert server is not None and server.pid is not None
        deadline = time.monotonic() + 30
        while children_of(server.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert children_of(server.pid) == set()
    finally:
        gc.enable()


def test_lost_fork_server_starts_again() -> None:
    compiler = GrammarCompiler(TINY)
    held = open_matcher(compiler, 'start: "a"')
    server = compiler._server
    assert server is not None and server.pid is not None
    lost = server.pid
    os.kill(lost, signal.SIGKILL)
    os.waitid(os.P_PID, lost, os.WEXITED | os.WNOWAIT)
    assert open_matcher(compiler, 'start: "b"').forced == TINY.encode("b")[0]
    assert server.pid != lost
    assert held.forced == TINY.encode("a")[0]  # its process is still alive


def test_fork_server_ends_with_its_compiler() -> None:
    compiler = GrammarCompiler(TINY)
    open_matcher(compiler, 'start: "a"').close()
    server = compiler._server
    assert server is not None and server.pid is not None
    pid = server.pid
    del compiler, server
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_concurrent_callers_try_a_grammar_once() -> None:
    compiler = GrammarCompiler(TINY)
    wanted = ['start: "a"', 'start: "b"'] * 3
    await asyncio.gather(
        *(compiler.prepare(grammar, owner=f"r{index % 4}") for index, grammar in enumerate(wanted))
    )
    assert compiler.counts == {"accepted": 2}
    with pytest.raises(GrammarError) as caught:
        await compiler.prepare("start: nothing")
    assert caught.value.reason == "invalid" and '"nothing"' in str(caught.value)


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="looks into /proc")
async def test_killed_grammar_process_fails_its_own_response(model, engine) -> None:
    serve = replace(SERVE, grammar_timeout_s=2.5)  # gives a compiler of this test alone
    loop = EngineLoop(engine, model.params, 0, model.tokenizer, serve)
    loop.start()
    try:
        spared = loop.submit([1], SamplingParams(max_tokens=90, grammar='start: "b"{80}'))
        await anext(spared)
        server = loop._grammars._server
        assert server is not None and server.pid is not None
        others = children_of(server.pid)
        doomed = loop.submit([1], SamplingParams(max_tokens=90, grammar='start: "a"{80}'))
        plain = loop.submit([1], SamplingParams(max_tokens=90, ignore_eos=True))
        await anext(doomed)
        (victim,) = children_of(server.pid) - others
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineError):  # the kernel's fault, not the grammar's
            await doomed.result()
        assert (await spared.result()).text == "b" * 80
        assert len((await plain.result()).token_ids) == 90
        assert loop.status == "ok" and loop.stats()["serve/grammar_errors"] == 1
    finally:
        loop.close()


def test_masks_of_a_response_share_an_allowance() -> None:
    settings = {"tokenizer": TINY.to_json(), "end_of_turn_id": TINY.end_of_turn_id}
    tables = grammar_child.make_tables(settings | {"special_ids": sorted(TINY.special_ids)})
    assert not isinstance(tables, str)
    kinds = []
    for seconds_left in (10.0, -10.0):
        matcher = llguidance.LLMatcher(tables, 'start: "aa"', log_level=0)
        reply = grammar_child.MatchedResponse(matcher, seconds_left).push(TINY.encode("a")[0])
        kinds.append(reply[:1])
    assert kinds == [grammar_child.FORCED, grammar_child.FAILED]


def test_an_overdue_reply_ends_its_response_though_nobody_waits_for_it():
    ours, theirs = socket.socketpair()  # a process that never answers
    process = GrammarProcess(ours, SERVE)
    with theirs:
        patient = Matcher(process, 1, patience_s=60.0)
        patient.poll()
        assert not patient.has_mask
        with pytest.raises(GrammarProcessLost):
            Matcher(process, 1, patience_s=0.0).poll()


LATE_SIGNAL = """
import json, os, signal, socket, sys
from lightning_jax.engine.grammar.child import ForkServer

control, peer = socket.socketpair()
peer.close()
ForkServer(control, json.loads(sys.argv[1])).run()
os.kill(os.getpid(), signal.SIGCHLD)
"""


def test_a_child_that_ends_after_its_server_prints_nothing() -> None:
    settings = {"tokenizer": TINY.to_json(), "end_of_turn_id": 258, "special_ids": [256, 257, 258]}
    python = [sys.executable, "-c", LATE_SIGNAL, json.dumps(settings)]
    ended = subprocess.run(python, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
