"""HTTP service for paragraph search: one process for any number of agents.

    python agents/paragraph_search.py --corpus corpus.jsonl.gz --index runs/index --retriever bm25

The first start builds the index in that directory. When it is ready, one line on standard output
gives the address: {"url": "http://127.0.0.1:41234", ...}.

    POST /search {"query": "who made the Lap Engine?"}
    -> {"paragraphs": [{"pid": "p05358", "title": "Lap Engine", "text": "The Lap Engine is ..."}]}
    POST /search {"query": "who made the Lap Engine?", "without": ["p05358"]} -> the next best
    GET /health -> {"corpus": ..., "retriever": ..., "num_paragraphs": ...}
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from paragraph_index import RETRIEVERS, ParagraphIndex, SearchError, open_index
from sentence_encoder import PACKAGED

MAX_WITHOUT = 1000  # pids per request


def make_app(index: ParagraphIndex, top_k: int, max_chars: int) -> web.Application:
    """Build the HTTP application."""

    async def search(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            query, without = body["query"], body.get("without", [])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            query, without = None, []
        if not isinstance(query, str) or not _are_texts(without):
            expected = (
                'expected a JSON object with a text "query" and, if any, '
                f'at most {MAX_WITHOUT} pids in "without".'
            )
            return web.json_response({"error": expected}, status=400)
        paragraphs = await asyncio.to_thread(index.search, query, top_k, frozenset(without))
        clipped = [entry | {"text": clip(entry["text"], max_chars)} for entry in paragraphs]
        return web.json_response({"paragraphs": clipped})

    async def health(_: web.Request) -> web.Response:
        return web.json_response(index.meta | {"num_paragraphs": len(index)})

    app = web.Application()
    app.router.add_post("/search", search)
    app.router.add_get("/health", health)
    return app


def _are_texts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_WITHOUT
        and all(isinstance(item, str) for item in value)
    )


def clip(text: str, max_chars: int) -> str:
    """Return the text, cut at the end of a word if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    return (text[: max_chars + 1].rpartition(" ")[0] or text[:max_chars]) + " ..."


async def serve(app: web.Application, host: str, port: int) -> None:
    """Serve requests until cancelled."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        name, number = runner.addresses[0][:2]
        print(json.dumps({"url": f"http://{name}:{number}", "pid": os.getpid()}), flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def end_with_standard_input() -> None:
    """End this process when standard input closes, which happens whenever the parent dies."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the search of paragraphs over HTTP.")
    parser.add_argument("--corpus", required=True, type=Path, help=".jsonl or .jsonl.gz")
    parser.add_argument(
        "--index", required=True, type=Path, help="index directory, created if missing"
    )
    parser.add_argument("--retriever", choices=RETRIEVERS, default="bm25")
    parser.add_argument(
        "--encoder", default=PACKAGED, help="encoder for dense: a directory or hub id (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=3, help="paragraphs per query (%(default)s)")
    parser.add_argument(
        "--max-chars",
        type=int,
        default=500,
        help="maximum characters per paragraph (%(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port, 0 for any free one")
    parser.add_argument(
        "--end-with-stdin", action="store_true", help="exit when standard input closes"
    )
    args = parser.parse_args()
    if args.top_k < 1 or args.max_chars < 1:
        parser.error(
            f"--top-k is {args.top_k} and --max-chars {args.max_chars}; expected 1 or more."
        )
    if args.end_with_stdin:
        end_with_standard_input()
    try:
        index = open_index(args.index, args.corpus, args.retriever, args.encoder)
        app = make_app(index, args.top_k, args.max_chars)
        asyncio.run(serve(app, args.host, args.port))
    except (SearchError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
