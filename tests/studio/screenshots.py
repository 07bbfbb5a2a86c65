"""Take the screenshots of docs/howto/look_at_a_run.md from real runs.

    python tests/studio/screenshots.py RUNS [--live URL] [--out docs/images]

RUNS is a folder with two runs of the starter, which `lightning-jax new` makes. URL is the page of a
training that runs now (`train --studio`).
"""

import argparse
import asyncio
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestServer
from chromium import Page, open_browser
from PIL import Image

from lightning_jax.studio.live.answers import compare_answer
from lightning_jax.studio.live.catalog import Catalog
from lightning_jax.studio.live.overview import find_worst_group
from lightning_jax.studio.live.server import LiveServer

DESK, PHONE = (1000, 720), (390, 800)
NUM_COLORS = 256
SETTLE_S = 1.0  # until curves have their size


@dataclass(frozen=True)
class Shot:
    """A picture: its name, the place in the page, its size, colors, and when it is complete."""

    name: str
    place: str
    size: tuple[int, int]
    colors: str
    until: str


def shots(catalog: Catalog) -> list[Shot]:
    """Return the pictures of a folder of runs. The oldest run comes first in a comparison."""
    oldest = sorted(catalog.summaries(), key=lambda summary: summary.started_s or 0.0)
    first, second = (catalog.run(summary.key) for summary in oldest[:2])
    with first.listing() as listing:
        worst = find_worst_group(listing, first.summary())
    assert worst is not None, "the first run has no step with rollouts"
    changed: Any = compare_answer([[first], [second]])["pairs"][0]["tasks"][0]
    before, after = changed["before_rollouts"][0], changed["after_rollouts"][0]
    beside = "/".join((first.key, before["rollout_id"], second.key, after["rollout_id"]))
    run, group = f"run/{first.key}", worst["group_id"]
    rollout = f"{run}/rollout/{group}-01-1"
    return [
        Shot("runs", "", DESK, "light", "document.querySelectorAll('canvas').length > 1"),
        Shot("run", run, DESK, "light", "document.querySelector('.chip')"),
        Shot("run_phone", run, PHONE, "light", "document.querySelector('.chip')"),
        Shot("group", f"{run}/group/{group}", DESK, "light", "document.querySelector('pre')"),
        Shot("rollout", rollout, DESK, "dark", "document.querySelector('.span pre')"),
        Shot("rollout_phone", rollout, PHONE, "dark", "document.querySelector('.span pre')"),
        Shot(
            "compare",
            f"compare/{first.key}/{second.key}",
            DESK,
            "light",
            "document.querySelector('.verdict')",
        ),
        Shot("beside", f"beside/{beside}", DESK, "dark", "document.querySelector('.turn')"),
    ]


async def take(page: Page, base: str, shot: Shot, folder: Path) -> None:
    """Write one picture with few colors, which keeps it small."""
    await page.resize(*shot.size, is_phone=shot.size == PHONE)
    await page.set_colors(shot.colors)
    await page.open(f"{base}#/{shot.place}", shot.until)
    await asyncio.sleep(SETTLE_S)
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    path = folder / f"studio_{shot.name}.png"
    picture.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1024:.0f} KiB\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--live")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    catalog = Catalog([arguments.runs])
    with tempfile.TemporaryDirectory() as profile:
        async with (
            TestServer(LiveServer(catalog).application()) as server,
            open_browser(Path(profile) / "profile") as page,
        ):
            for shot in shots(catalog):
                await take(page, str(server.make_url("/")), shot, arguments.out)
            if arguments.live:
                facts = "[...document.querySelectorAll('.live .fact')].map((x) => x.innerText)"
                is_busy = f"{facts}.some((text) => /^[1-9][0-9.]+\\s+tokens/.test(text))"
                await page.open(f"{arguments.live}#/", "document.querySelector('td a')")
                key = await page.run("document.querySelector('td a').hash.split('/').at(-1)")
                live = Shot("live", f"run/{key}", (1000, 480), "dark", is_busy)
                await take(page, arguments.live, live, arguments.out)


if __name__ == "__main__":
    asyncio.run(main())
