"""`lightning-jax worker`: run the agent for a run on another machine. It needs no JAX."""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import ClassVar

from lightning_jax.cli.command import AtLeastOne, SettingsCommand, flag
from lightning_jax.cli.runtime import run_until_stopped
from lightning_jax.settings.schema import is_plain_url

log = logging.getLogger(__name__)

KEY = "LIGHTNING_KEY"


@dataclass(frozen=True, kw_only=True)
class Worker(SettingsCommand):
    """Run the agent of a config on rollouts of a run whose server is elsewhere.

    The agent's file and settings must be the run's. Without FILE, use config.yaml. Ctrl-C gives
    running rollouts back, and the run gives them to other workers.
    """

    needs_jax: ClassVar[bool] = False
    server: str = flag("URL of the run's server, such as http://trainer:8000", "URL", required=True)
    key: str | None = flag(f"the run's serve.api_key (default: ${KEY})")
    concurrency: AtLeastOne | None = flag("rollouts at once (default: rollout.concurrency)", "N")

    def run(self) -> int:
        from lightning_jax.rollouts.agents.program import make_agent
        from lightning_jax.rollouts.workers.work import fingerprint
        from lightning_jax.rollouts.workers.worker import Server, run_worker, worker_name
        from lightning_jax.settings import ConfigError
        from lightning_jax.system.network import go_direct
        from lightning_jax.train.loop.check import check_agent

        key = self.key or os.environ.get(KEY)
        if not key:
            raise ConfigError.missing(
                "--key", f"there is no key; pass --key or set ${KEY} to the run's serve.api_key."
            )
        if not is_plain_url(self.server):
            raise ConfigError.invalid(
                "--server",
                f"--server is {self.server!r}; expected a URL, such as http://trainer:8000.",
            )
        # Others may name files and variables of the run's machine.
        config = self.load_config(only=["agent", "rollout", "algorithm"])
        check_agent(config)
        go_direct(self.server)  # before the agent makes its clients
        agent = make_agent(config.agent)
        concurrency = self.concurrency or config.rollout.concurrency
        server = Server(self.server.rstrip("/").removesuffix("/v1"), key)
        log.info("taking up to %d rollouts at once from %s", concurrency, server.url)
        digest, name = fingerprint(config.agent), worker_name()
        try:
            work = run_worker(agent, digest, server, concurrency=concurrency, name=name)
            run_until_stopped(work)
        except asyncio.CancelledError:
            log.info("stopped")
        return 0
