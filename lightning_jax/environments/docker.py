"""Containers of Docker, for Harbor tasks whose environment is an image.

The agent's command runs inside the container, so the image must have it. The container shares the
network of this machine, because the policy listens there.
"""

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_jax.environments.sandbox import BoxLimits, run_limited
from lightning_jax.errors import UserError
from lightning_jax.rollouts.agents.process import ProgramEnd
from lightning_jax.rollouts.agents.program import inherited

SECONDS = 120.0  # for a command of Docker that runs nothing in the container
BUILD_S = 600.0  # unless the task has another limit
IMAGE = re.compile(r"[a-zA-Z0-9][\w./:@-]*", re.ASCII)


@dataclass(frozen=True)
class Container:
    """Running container of one attempt."""

    name: str

    async def run(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        stdin: bytes,
        timeout_s: float,
    ) -> ProgramEnd:
        """Run a program in the container's working directory. `exceeded` may be timeout_s."""
        names = [word for name in variables for word in ("--env", name)]  # values stay out of argv
        return await _docker(["exec", "-i", *names, self.name, *words], timeout_s, stdin, variables)

    async def end_processes(self) -> None:
        """End all programs in the container. Its files stay."""
        await _checked(["restart", "--time", "0", self.name])

    async def put(self, source: Path, target: str) -> None:
        """Replace a directory in the container by a copy of one here."""
        await _checked(["exec", "--user", "0", self.name, "rm", "-rf", target])
        await _checked(["cp", str(source), f"{self.name}:{target}"])

    async def get(self, source: str, target: Path) -> None:
        """Copy a directory of the container to one here."""
        await _checked(["cp", f"{self.name}:{source}/.", str(target)])


@contextlib.asynccontextmanager
async def open_container(
    folder: Path, settings: Mapping[str, Any], limits: BoxLimits
) -> AsyncIterator[Container]:
    """Start a container of a task's image, which is built if necessary, and remove it at the end.

    Raises UserError if Docker is missing or the image cannot be built.
    """
    if shutil.which("docker") is None:
        raise UserError.not_installed(
            "docker", "sandbox is docker, which is not installed; install it, or use sandbox=auto."
        )
    image = await _image(folder, settings.get("environment", {}))
    name = f"lightning-{uuid.uuid4().hex}"
    start = ["run", "--detach", "--init", "--name", name, "--network", "host"]
    start += ["--memory", f"{limits.memory_mib}m", "--pids-limit", str(limits.max_processes)]
    start += ["--security-opt", "no-new-privileges", "--entrypoint", "sleep", image, "infinity"]
    try:
        await _checked(start)
        yield Container(name)
    finally:
        await _docker(["rm", "--force", "--volumes", name], SECONDS)


async def _image(folder: Path, environment: Mapping[str, Any]) -> str:
    """Return the name of the task's image, after building it from its Dockerfile."""
    source = folder / "environment"
    if not (source / "Dockerfile").exists():
        return _checked_image(environment.get("docker_image"), folder)
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes())
    image = f"lightning-task:{digest.hexdigest()[:32]}"
    if (await _docker(["image", "inspect", image], SECONDS)).status != 0:
        limit = float(environment.get("build_timeout_sec", BUILD_S))
        await _checked(["build", "--tag", image, str(source)], limit)
    return image


def _checked_image(name: Any, folder: Path) -> str:
    """Return the name of an image. Raises UserError for what Docker would read as an option."""
    if isinstance(name, str) and IMAGE.fullmatch(name):
        return name
    raise UserError.invalid(
        "docker_image",
        f"{folder / 'task.toml'} has docker_image={name!r}; expected the name of an image, such as "
        "python:3.12-slim.",
    )


async def _checked(words: Sequence[str], timeout_s: float = SECONDS) -> None:
    """Run a command of Docker. Raises UserError if it fails."""
    end = await _docker(words, timeout_s)
    if end.status != 0:
        lines = end.errors.strip().splitlines() or [end.exceeded or "no message"]
        raise UserError(
            f"docker {words[0]} failed ({lines[-1][-300:]}); check that Docker runs, and the "
            "task's environment.",
            reason="failed",
            key="docker",
        )


async def _docker(
    words: Sequence[str],
    timeout_s: float,
    stdin: bytes = b"",
    variables: Mapping[str, str] | None = None,
) -> ProgramEnd:
    docker = {name: text for name, text in os.environ.items() if name.startswith("DOCKER_")}
    environment = {**(variables or {}), **inherited(()), **docker}
    return await run_limited(["docker", *words], environment, stdin, timeout_s)
