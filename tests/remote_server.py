"""OpenAI-compatible server in a thread, for commands that run in the test's own thread."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class RemoteServer:
    """Server whose reply is a function of the last message. A number is the status of an error."""

    reply: Callable[[str], str | int] = lambda text: text
    url: str = ""
    keys: list[str | None] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        reply = self.reply(body["messages"][-1]["content"])
        if isinstance(reply, int):
            return reply, {"error": {"message": "scripted failure", "code": "scripted"}}
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 31, "completion_tokens": 17, "total_tokens": 48}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return 200, answer | {"choices": [choice], "usage": usage}


@contextmanager
def serving(reply: Callable[[str], str | int]) -> Iterator[RemoteServer]:
    """Run the server until the block ends."""
    server = RemoteServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.keys.append(self.headers.get("Authorization"))
            server.bodies.append(body)
            status, answer = server.answer(body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}/v1"
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield server
        listening.shutdown()
        thread.join()
