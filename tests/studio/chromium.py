"""Chromium over its debugging protocol: pages as people see them, with sizes, colors and times."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
START_S = 60.0


class BrowserError(RuntimeError):
    """Failure of a command or of a script in the page."""


class Page:
    """One tab. Only one task may use it at a time."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            found = await self._socket.receive_json()
            if found.get("id") == number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']}")
                return found["result"]

    async def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it returns."""
        found = await self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def open(self, url: str, until: str = "true", timeout_s: float = 30.0) -> None:
        """Load an address, also if only its part after # differs, and wait for an expression."""
        await self.command("Page.navigate", url="about:blank")
        await self.command("Page.navigate", url=url)
        await self.wait_for(f"location.href !== 'about:blank' && ({until})", timeout_s)

    async def wait_for(self, expression: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(BrowserError):  # the document is being replaced
                    if await self.run(f"Boolean({expression})"):
                        return
                await asyncio.sleep(0.05)

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone},
        )

    async def set_colors(self, scheme: str) -> None:
        """Prefer "light" or "dark" colors."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.command("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self) -> bytes:
        """Return a PNG of what the window shows."""
        return base64.b64decode((await self.command("Page.captureScreenshot"))["data"])


@contextlib.asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Page]:
    """Start Chromium with a new profile and yield its tab."""
    assert CHROMIUM is not None
    profile.mkdir(parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                tabs = await response.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                await page.command("Page.enable")
                yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _port(path: Path) -> int:
    async with asyncio.timeout(START_S):
        while not (path.is_file() and path.read_text().strip()):
            await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])
