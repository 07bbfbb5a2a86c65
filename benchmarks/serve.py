"""Measure the server's speed on agent workloads, next to other servers in the same run.

    python benchmarks/serve.py [--model NAME] [--only W1 W2] [--ours bfloat16 float32]
                               [--peers vllm llama_cpp transformers] [--peer NAME=URL ...]
                               [--llama-server BINARY FILE.gguf]

Without peers only our server is measured, over HTTP and in a separate process. It runs with
bfloat16 weights and float32 activations, its fastest setting on a CPU, and again all in float32.

`--peers` are engines that `peers/run_NAME.py` calls inside its own process, without HTTP, which
favors them. Each has its own environment in `peers/.venvs/`, made once from `requirements-NAME.txt`
(compiling llama.cpp takes minutes). They read the same weights from a Hugging Face directory that
is written once to `.cache/`. Delete it when the model behind a name changes.

`--peer` is a server that is already running. It must support OpenAI's completions with token ids as
prompts, and `ignore_eos`. `--llama-server` starts llama.cpp's own server (llama_server.py). Its
convert_hf_to_gguf.py writes the file from that directory, with `--outtype bf16`.

All get the same prompts, the same numbers of tokens and temperature 1, as workloads.py defines. At
most 16 requests run at once, each of at most 1,024 tokens, with a prefix cache if there is one. W5
runs 8 of 8,192, for our server and those of `--peer` alone.
Servers are measured one after another. Each workload runs twice and the second run is reported, so
compiling and loading do not count. The two runs have different prompts, so that none is cached.

In the table, `ratio` is a peer's time divided by that of our first setting. `ms/token` is the
median time between two tokens of a response, `gap` the longest of them in seconds. `prefill/s` is
the prompt tokens computed per second until every request had its first token. It needs a workload
whose requests all fit in at once.
"""

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import llama_server
import numpy as np
from speed import median_s
from workloads import (
    LONG,
    LONG_LEN,
    LONG_SLOTS,
    MAX_LEN,
    PREFILLED,
    SLOTS,
    THREADS,
    WORKLOADS,
    Reply,
    Result,
    measure_twice,
    quantile,
)

from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.testing.machine import environment

HERE = Path(__file__).parent
# Arguments of our server: the types of its weights and activations.
OURS = {
    "bfloat16": ("--dtype", "bfloat16", "--activation-dtype", "float32"),
    "float32": ("--dtype", "float32"),
}
PEERS = {
    "vllm": ("float32", "bfloat16"),
    "llama_cpp": ("bfloat16",),
    "transformers": ("float32",),
}
COLUMNS = (
    "seconds",
    "ratio",
    "tokens/s",
    "ttft p50",
    "p99",
    "ms/token",
    "gap",
    "prefill/s",
    "cpu s",
)


class PeerError(RuntimeError):
    """Peer that could not be measured."""


@dataclass(frozen=True)
class Target:
    """Server to measure."""

    name: str
    url: str  # with /v1
    key: str
    model: str
    process: int | None = None  # its id, if we started it


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    workload: str
    server: str
    result: Result


async def request(
    http: aiohttp.ClientSession, target: Target, prompt: Sequence[int], new: int
) -> Reply:
    """Stream a completion of exactly `new` tokens. Raises RuntimeError if it fails."""
    body = {
        **{"model": target.model, "prompt": list(prompt), "max_tokens": new, "temperature": 1.0},
        **{"stream": True, "ignore_eos": True, "return_token_ids": True},
    }
    started, ids, times = time.perf_counter(), [], []
    headers = {"Authorization": f"Bearer {target.key}"}
    async with http.post(f"{target.url}/completions", json=body, headers=headers) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{target.name} failed: {event['error']}")
            new_ids = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
            ids += new_ids
            times += [time.perf_counter() - started] * len(new_ids)
        if response.status != 200 or len(ids) != new:
            raise RuntimeError(
                f"{target.name} gave {len(ids)} tokens with status {response.status}; expected "
                f"{new} tokens with their ids."
            )
    return Reply(tuple(ids), tuple(times))


async def measure_server(target: Target, name: str) -> Row:
    """Measure one workload over HTTP."""
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as http:
        result = await measure_twice(partial(request, http, target), name, target.process)
    return Row(name, target.name, result)


def start_ours(model: str, dtype: str, *, is_long: bool) -> tuple[Target, subprocess.Popen]:
    """Start our own server, and return it once it answers."""
    slots, max_len = (LONG_SLOTS, LONG_LEN) if is_long else (SLOTS, MAX_LEN)
    command = [sys.executable, "-m", "lightning_jax", "serve", "--model", model, "--port", "0"]
    command += ["--slots", str(slots), "--max-len", str(max_len), "--api-key", "bench"]
    command += OURS[dtype]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert child.stdout is not None, "its output is piped"
    line = child.stdout.readline()
    if " answers at " not in line:
        child.kill()
        raise RuntimeError(f"our server did not start: {line!r}")
    url = line.split(" answers at ")[1].split()[0]
    return Target(f"ours {dtype}", url, "bench", "policy", child.pid), child


def measure_ours(model: str, dtype: str, names: Sequence[str]) -> Iterator[Row]:
    """Measure our server, which runs only meanwhile."""
    for is_long, same in itertools.groupby(names, key=LONG.__contains__):
        target, child = start_ours(model, dtype, is_long=is_long)
        try:
            for name in same:
                yield asyncio.run(measure_server(target, name))
        finally:
            child.terminate()
            child.wait(timeout=60)


def measure_peer(
    peer: str, dtype: str, directory: Path, names: Sequence[str], python: Path
) -> Iterator[Row]:
    """Measure an engine in its own process, which prints a line per workload. Raises PeerError."""
    command = [python, HERE / f"peers/run_{peer}.py", directory, "--dtype", dtype, "--only", *names]
    for event in events(f"{peer} {dtype}", command):
        if "versions" in event:
            print_line(f"{peer}: {as_words(event['versions'])}")
        else:
            yield Row(event.pop("workload"), f"{peer} {dtype}", Result(**event))


def measure_llama_server(binary: str, weights: str, names: Sequence[str]) -> Iterator[Row]:
    """Measure llama.cpp's server. Raises PeerError."""
    for name in names:
        try:
            result = asyncio.run(llama_server.measure(binary, Path(weights), name))
        except (OSError, RuntimeError) as error:
            raise PeerError(str(error)) from error
        yield Row(name, "llama-server", result)


def events(name: str, command: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a program prints. Raises PeerError if it fails."""
    log = HERE / f".cache/{name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None, "its output is piped"
        for line in child.stdout:
            if line.startswith('{"'):  # other lines come from libraries
                yield json.loads(line)
    if child.returncode != 0:
        raise PeerError(f"{name} ended with {child.returncode}; see {log.relative_to(HERE)}")


def hf_directory(model: str) -> Path:
    """Return a Hugging Face directory with the model's float32 weights.

    Write it if there is none.
    """
    if Path(model).is_dir():
        return Path(model)
    directory = HERE / ".cache" / Path(model).name
    if not (directory / "config.json").exists():
        save_hf(directory, load_model(model))
    return directory


def print_line(text: str) -> None:
    print(text, flush=True)


def as_words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def print_machine() -> None:
    """Print the machine's CPU, load and measured speed, and our package versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")
    print_line(f"CPU: {cpu}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.2f}")
    source, target = np.ones((THREADS, 2**26), np.float32), np.empty((THREADS, 2**26), np.float32)
    with ThreadPoolExecutor(THREADS) as threads:
        copied = median_s(lambda: list(threads.map(np.copyto, target, source)), 5)
    matrix = np.ones((2048, 2048), np.float32)
    multiplied = median_s(lambda: matrix @ matrix, 5)
    print_line(
        f"copying {source.nbytes / 2**20:.0f} MiB: {2 * source.nbytes / copied / 1e9:.1f} GB/s "
        f"read and written; float32 matrix product: {2 * 2048**3 / multiplied / 1e9:.0f} GFLOP/s"
    )
    print_line(f"lightning_jax: {as_words({n: version(n) for n in ('jax', 'jaxlib', 'numpy')})}")


def head() -> str:
    return f"{'':4} {'server':18}" + "".join(f"{x:>10}" for x in (*COLUMNS, "peak MiB"))


def as_line(row: Row, ours: float | None) -> str:
    """Format one line of the table. `ours` is our time in seconds for the same workload."""
    result, first = row.result, row.result.first_token_s
    prefilled = PREFILLED.get(row.workload)
    cells = [
        f"{result.seconds:.2f}",
        "-" if ours is None else f"{result.seconds / ours:.2f}",
        f"{result.new_tokens / result.seconds:.1f}",
        f"{quantile(first, 0.5):.3f}",
        f"{quantile(first, 0.99):.3f}",
        f"{1e3 * result.decode_s:.1f}",
        f"{result.gap_s:.2f}",
        "-" if prefilled is None else f"{prefilled / max(first):.0f}",
        "-" if result.cpu_s is None else f"{result.cpu_s:.1f}",
        "-" if result.peak_mib is None else f"{result.peak_mib:.0f}",
    ]
    return f"{row.workload:4} {row.server:18}" + "".join(f"{cell:>10}" for cell in cells)


def compare(args: argparse.Namespace, servers: Sequence[Target]) -> int:
    """Print every line as soon as it is measured, then the table.

    Return the number of failed peers.
    """
    # Install, write and load everything before the first measurement.
    pythons = {
        peer: environment(HERE / f"peers/requirements-{peer}.txt", HERE / "peers/.venvs")
        for peer in args.peers
    }
    directory = hf_directory(args.model) if args.peers else Path()
    print_machine()
    print_line(head())
    measured: list[Callable[[], Iterator[Row]]] = [
        partial(measure_ours, args.model, dtype, args.only) for dtype in args.ours
    ]
    short = [name for name in args.only if name not in LONG]
    measured += [
        partial(measure_peer, peer, dtype, directory, short, pythons[peer])
        for peer in args.peers
        for dtype in PEERS[peer]
        if short
    ]
    for server in servers:
        measured.append(
            lambda server=server: (asyncio.run(measure_server(server, n)) for n in args.only)
        )
    if args.llama_server and short:
        measured.append(partial(measure_llama_server, *args.llama_server, short))
    rows: list[Row] = []
    ours: dict[str, float] = {}
    failed = 0
    for rows_of in measured:
        try:
            for row in rows_of():
                ours.setdefault(row.workload, row.result.seconds)
                rows.append(row)
                print_line(as_line(row, ours[row.workload]))
        except PeerError as error:
            failed += 1
            print_line(str(error))
    print_line(f"\nBy workload; load {os.getloadavg()[0]:.2f}\n{head()}")
    for row in sorted(rows, key=lambda row: args.only.index(row.workload)):
        print_line(as_line(row, ours[row.workload]))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare servers on the work of agents.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ours", nargs="+", choices=OURS, default=list(OURS), metavar="DTYPE")
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=[], help="engines, each in its own process"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL[,MODEL[,KEY]]",
        help="another server, its URL with /v1",
    )
    parser.add_argument(
        "--llama-server", nargs=2, metavar=("BINARY", "FILE.gguf"), help="llama.cpp's own server"
    )
    args = parser.parse_args()
    servers = []
    for text in args.peer:
        name, equals, address = text.partition("=")
        url, model, key = (*address.split(","), "", "")[:3]
        if not equals or not url.startswith("http"):
            parser.error(
                f"--peer is {text!r}; expected NAME=URL, such as vllm=http://HOST:8000/v1."
            )
        servers.append(Target(name, url.rstrip("/"), key or "none", model or args.model))
    if compare(args, servers):
        sys.exit(1)


if __name__ == "__main__":
    main()
