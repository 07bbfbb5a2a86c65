"""A hostile client with plain sockets. It needs the standard library alone, so that a process of
its own can run it and it shares no interpreter with the server.
"""

import contextlib
import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Attacker:
    """Client of one hostile agent: its rollout's URL and key, and a neighbour's id."""

    base_url: str
    api_key: str
    neighbour_id: str

    @property
    def server(self) -> str:
        """The server's URL, without the rollout's part."""
        return self.base_url.split("/rollout/")[0]

    @property
    def rollout_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def post(
        self, path: str, body: Any, *, base: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Send one request; return its status and body. Status 0: the server hung up."""
        url = urlsplit((base or self.rollout_url) + path)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            try:
                target = url.path + (f"?{url.query}" if url.query else "")
                connection.request("POST", target, raw, sent | headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (ConnectionError, http.client.HTTPException, TimeoutError):
                return 0, b""

    def flood(self, path: str, bodies: list[Any], threads: int = 32) -> list[int]:
        """Send many requests at once; return their statuses."""
        with ThreadPoolExecutor(threads) as pool:
            return [status for status, _ in pool.map(lambda body: self.post(path, body), bodies)]

    def hold_connections(self, number: int, first: bytes, seconds: float) -> int:
        """Open connections that send little and never end; return how many were accepted."""
        url, held = urlsplit(self.server), []
        try:
            for _ in range(number):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((url.hostname, url.port), timeout=2)
                    held.append(connection)
                    connection.sendall(first)
            time.sleep(seconds)
            return len(held)
        finally:
            for connection in held:
                connection.close()
