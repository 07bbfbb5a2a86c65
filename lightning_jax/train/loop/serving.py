"""Servers of a run: engines of its own process, or samplers in a cluster."""

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import INITIAL
from lightning_jax.models.reshard import copy_host_weights, copy_to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rollouts.config import RolloutConfig
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
        return partial(_in_cluster().serve_by_samplers, config, model, store, initial)
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
        placing = nullcontext((None, config.serve))
        if config.cluster.workers:
            placing = _in_cluster().worker_placement(config.cluster, config.serve, config.run_dir)
        with placing as (workers, address):
            gateway = Gateway(engine, store, serve=address, routing=routing_of(config))
            yield Served(gateway, engine, workers=workers)

    return serve


def _in_cluster() -> Any:
    """Return the module that serves and runs agents in a cluster, which only some runs need."""
    return importlib.import_module("lightning_jax.cluster.serving")


def routing_of(config: Config) -> Routing:
    """Return who answers and trains which calls, those of judges included."""
    return Routing(judge_roles(config.asked_models) | config.roles, config.policy_table)


def requests_at_once(rollout: RolloutConfig) -> int:
    """Return the number of requests that arrive together when a step begins."""
    return min(rollout.concurrency, rollout.tasks_per_step * rollout.group_size)
