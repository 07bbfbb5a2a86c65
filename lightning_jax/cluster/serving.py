"""Servers and workers of a run that Ray places. Runs load this module by its name."""

import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_jax.cluster.ray_session import ray_session
from lightning_jax.cluster.sampler import SamplerSpec
from lightning_jax.cluster.samplers import Samplers
from lightning_jax.cluster.workers import workers_in_cluster
from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.http.server import is_exposed
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.reshard import HostWeights, copy_to_host
from lightning_jax.rollouts.workers.pool import OtherMachines
from lightning_jax.traces.store import Store
from lightning_jax.train.config import ClusterConfig, Config
from lightning_jax.train.loop.serving import Served, requests_at_once, routing_of
from lightning_jax.train.state.replica import Replica


@asynccontextmanager
async def serve_by_samplers(
    config: Config, model: LoadedModel, store: Store, initial: HostWeights | None, replica: Replica
) -> AsyncIterator[Served]:
    """Start samplers with the weights of a train state, and yield the servers of the run.

    `initial` are the weights from the start of the run, if a role asks for them.
    """
    async with AsyncExitStack() as at_end:
        ray = at_end.enter_context(ray_session(config.cluster))
        samplers = Samplers(ray, config.cluster, _name_of(config.run_dir), store)
        engine = RemoteEngine(model.name, config.serve, model.tokenizer, counters=samplers.stats)
        workers, address = _workers(ray, config.cluster, config.serve, config.run_dir)
        gateway = Gateway(engine, store, serve=address)
        at_end.push_async_callback(samplers.end)
        spec = SamplerSpec(
            name=model.name,
            config=model.config,
            tokenizer=model.tokenizer,
            serve=replace(config.serve, api_key=gateway.api_key),
            dtype=config.model.dtype,
            tensor=config.mesh.tensor,
            routing=routing_of(config),
            num_requests=-(-requests_at_once(config.rollout) // config.cluster.samplers),
        )
        fixed = [] if initial is None else [(0, initial)]
        dtype = config.model.dtype
        trained = ((replica.step, copy_to_host(s.weights, dtype)) for s in replica.states)
        await samplers.start(spec, itertools.chain(trained, fixed))
        yield Served(gateway, samplers, server=samplers, workers=workers)


@contextmanager
def worker_placement(
    cluster: ClusterConfig, serve: ServeConfig, run_dir: str
) -> Iterator[tuple[OtherMachines | None, ServeConfig]]:
    """Yield the workers in a cluster, and the settings of a gateway that they reach."""
    with ray_session(cluster) as ray:
        yield _workers(ray, cluster, serve, run_dir)


def _workers(
    ray: Any, cluster: ClusterConfig, serve: ServeConfig, run_dir: str
) -> tuple[OtherMachines | None, ServeConfig]:
    """Return the workers in a cluster, and the settings of a gateway that they reach.

    A gateway that listens on the loopback interface listens on the address of this machine in the
    cluster instead, and always has a key.
    """
    if not cluster.workers:
        return None, serve
    if not is_exposed(serve.host):
        key = serve.api_key or secrets.token_urlsafe(24)
        serve = replace(serve, host=ray.util.get_node_ip_address(), api_key=key)
    return workers_in_cluster(ray, cluster, _name_of(run_dir)), serve


def _name_of(run_dir: str) -> str:
    """Return the name of the run in a cluster."""
    return str(Path(run_dir).resolve())
