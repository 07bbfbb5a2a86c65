"""Servers of a run: engines of its own process, or samplers in a cluster."""

import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_jax.cluster.ray_session import ray_session
from lightning_jax.cluster.sampler import SamplerSpec
from lightning_jax.cluster.samplers import Samplers
from lightning_jax.cluster.workers import workers_in_cluster
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.http.server import is_exposed
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import INITIAL
from lightning_jax.models.reshard import HostWeights, copy_host_weights, copy_to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rollouts.rewards.judge import judge_roles
from lightning_jax.rollouts.servers import RolloutServer
from lightning_jax.rollouts.workers.pool import OtherMachines
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.state.replica import Replica


@runtime_checkable
class ServedWeights(Protocol):
    """Weights that answer requests: an Engine's, or those of samplers."""

    def publish(self, params: Params | None, version: int, weights: int) -> None: ...


@dataclass(frozen=True)
class Served:
    """Servers of a run.

    `weights` are in the order of the train states. Rollouts are opened at `server`, or at the
    gateway if it is None. `workers` are those of a cluster.
    """

    gateway: Gateway
    weights: ServedWeights
    server: RolloutServer | None = None
    workers: OtherMachines | None = None  # that run agents


# Makes the servers of the weights in a train state. They end with the context.
Serve = Callable[[Replica], AbstractAsyncContextManager[Served]]


def prepare_serving(config: Config, model: LoadedModel, store: Store) -> Serve:
    """Return what makes the servers of a run.

    Initial weights that a role asks for are copied now, before the train state takes ownership.
    """
    has_initial = config.policy_table.row(INITIAL) is not None
    if config.cluster.samplers:
        dtype = config.model.dtype
        initial = copy_host_weights(copy_to_host(model.params, dtype)) if has_initial else None
        return partial(_serve_by_samplers, config, model, store, initial)
    mesh = serving_mesh(config.serve.mesh, config.mesh)
    programs = make_programs(model.config, config.serve, dtype=config.model.dtype, mesh=mesh)
    make_engine = partial(Engine, serve=config.serve, programs=programs)
    frozen = make_engine(model) if has_initial else None

    @asynccontextmanager
    async def serve(replica: Replica) -> AsyncIterator[Served]:
        engine, *others = [
            make_engine(replace(model, params=params), version=replica.step, share_base=True)
            for params in [state.weights for state in replica.states]
        ]
        for other in others:
            engine.add(other)
        if frozen is not None:
            engine.add(frozen, are_counted=False)
        replica.share_devices(engine)
        needs_ray = config.cluster.workers > 0
        with ray_session(config.cluster) if needs_ray else nullcontext() as ray:
            workers, address = _workers(config, ray)
            gateway = Gateway(engine, store, serve=address, routing=routing_of(config))
            yield Served(gateway, engine, workers=workers)

    return serve


def _workers(config: Config, ray: Any) -> tuple[OtherMachines | None, ServeConfig]:
    """Return the workers in a cluster, and the settings of a gateway that they reach.

    A gateway of this machine alone gets the address at which the cluster reaches this machine, and
    always has a key.
    """
    serve = config.serve
    if not config.cluster.workers:
        return None, serve
    if not is_exposed(serve.host):
        key = serve.api_key or secrets.token_urlsafe(24)
        serve = replace(serve, host=ray.util.get_node_ip_address(), api_key=key)
    return workers_in_cluster(ray, config.cluster, _name_of(config)), serve


def _name_of(config: Config) -> str:
    """Return the name of the run in a cluster."""
    return str(Path(config.run_dir).resolve())


def routing_of(config: Config) -> Routing:
    """Return who answers and trains which calls, those of judges included."""
    return Routing(judge_roles(config.asked_models) | config.roles, config.policy_table)


@asynccontextmanager
async def _serve_by_samplers(
    config: Config, model: LoadedModel, store: Store, initial: HostWeights | None, replica: Replica
) -> AsyncIterator[Served]:
    async with AsyncExitStack() as at_end:
        ray = at_end.enter_context(ray_session(config.cluster))
        samplers = Samplers(ray, config.cluster, _name_of(config), store)
        engine = RemoteEngine(model.name, config.serve, model.tokenizer, counters=samplers.stats)
        workers, address = _workers(config, ray)
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
            num_requests=-(-requests_at_once(config) // config.cluster.samplers),
        )
        fixed = [] if initial is None else [(0, initial)]
        dtype = config.model.dtype
        trained = ((replica.step, copy_to_host(s.weights, dtype)) for s in replica.states)
        await samplers.start(spec, itertools.chain(trained, fixed))
        yield Served(gateway, samplers, server=samplers, workers=workers)


def requests_at_once(config: Config) -> int:
    """Return the number of requests that arrive together when a step begins."""
    in_a_step = config.rollout.tasks_per_step * config.rollout.group_size
    return min(config.rollout.concurrency, in_a_step)
