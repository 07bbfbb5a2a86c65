"""Runs every client's tests, each in an environment of its own, against one server.

    python tests/clients/run.py [NAME ...]     such as openai or anthropic; all without a name

A file `test_NAME.py` is run with the packages of the requirements file whose first line names it,
in `tests/clients/.venvs/`, which is made once. The policy is a tiny random model. If there is
`npm-NAME.json`, npm installs its packages there, and the test runs in this environment with their
commands on the PATH and a policy of its own.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.gateway.app import RolloutSettings
from lightning_jax.testing.machine import environment
from lightning_jax.testing.service import Service, run_service
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.tree import is_gateway_call

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".venvs"
SERVE = ServeConfig(
    slots=8, max_len=2048, prefill_buckets=(64, 256), api_key="the-key", strict_models=True
)


def requirements_of(test: Path) -> Path:
    """The requirements file whose text names the client. Raises LookupError."""
    for path in sorted(HERE.glob("requirements-*.txt")):
        named = path.read_text().splitlines()[0].removeprefix("# For ").rstrip(":").split(", ")
        if test.name in named:
            return path
    raise LookupError(f"no requirements-*.txt says on its first line that it is for {test.name}.")


def setting_of(test: Path) -> tuple[str | Path, dict[str, str]]:
    """The Python of a test, and its variables. Raises LookupError if nothing names its packages."""
    packages = HERE / f"npm-{test.stem.removeprefix('test_')}.json"
    if not packages.exists():
        return environment(requirements_of(test), ENVIRONMENTS), {}
    folder = ENVIRONMENTS / packages.stem
    ready = folder / "ready.json"
    if not ready.exists() or ready.read_bytes() != packages.read_bytes():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(packages, folder / "package.json")
        subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True)
        shutil.copy(packages, ready)
    commands = folder / "node_modules/.bin"
    return sys.executable, {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}


async def main(names: list[str]) -> int:
    """Return the number of clients that failed."""
    tests = sorted(HERE.glob("test_*.py"))
    tests = [test for test in tests if not names or test.stem.removeprefix("test_") in names]
    model = tiny_model(0)
    with tempfile.TemporaryDirectory() as folder:
        async with run_service(
            Path(folder), model, SlotPrograms(model.config, SERVE), SERVE
        ) as service:
            failed = await _run_all(tests, service)
    print(f"{len(tests) - len(failed)} of {len(tests)} clients pass. Failed: {failed or 'none'}")
    return len(failed)


async def _run_all(tests: list[Path], service: Service) -> list[str]:
    """The names of the files that failed."""
    gateway, failed = service.gateway, []
    for number, test in enumerate(tests):
        python, added = setting_of(test)
        rollout_id = f"{test.stem}-{number}"
        llm = gateway.open_rollout(RolloutSettings(rollout_id, seed=number))
        variables = {
            "LIGHTNING_BASE": gateway.url,
            "LIGHTNING_ROLLOUT": llm.base_url.removesuffix("/v1"),
            "LIGHTNING_KEY": llm.api_key,
            **added,
        }
        # Our own conftest.py and plugins are not for these environments.
        command = [python, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", HERE]
        command += ["--noconftest", "-p", "no:cacheprovider", "-p", "no:asyncio"]
        command += ["-o", "markers=clients", test]
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | variables, cwd=HERE
        )
        code = await process.wait()
        traffic = gateway.close_rollout(rollout_id)
        spans = list(filter(is_gateway_call, service.store.spans(rollout_id)))
        print(f"{test.stem}: {len(spans)} calls, {traffic}")
        failed += [test.stem] * (code != 0)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
