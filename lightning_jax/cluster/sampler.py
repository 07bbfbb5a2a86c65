"""Sampler: engines with a gateway of their own, in a process that the run does not share."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import jax

from lightning_jax.cluster.delivery import Outbox, Parcel, Receipt
from lightning_jax.engine.by_policy import LoopsByPolicy
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway, Traffic
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.reshard import HostWeights, params_from_host
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rollouts.servers import GatewayServer


@dataclass(frozen=True)
class SamplerSpec:
    """Model and settings that all samplers of a run serve, without the weights.

    `tensor` of a sampler's devices compute one request together, unless `serve.mesh` says
    otherwise. `by_policy`: each policy has weights of its own.
    """

    name: str
    config: DecoderConfig
    tokenizer: Tokenizer
    serve: ServeConfig  # with the run's key
    dtype: str
    tensor: int
    routing: Routing
    by_policy: bool
    num_requests: int  # that arrive together at one sampler

    def mesh_config(self) -> MeshConfig:
        """Return the mesh of a sampler in the devices that it sees."""
        if self.serve.mesh is not None:
            return self.serve.mesh
        is_cpu = jax.devices()[0].platform == "cpu"  # whose devices are simulated
        return MeshConfig(data=1 if is_cpu else -1, fsdp=1, tensor=1 if is_cpu else self.tensor)


class Sampler(GatewayServer):
    """Engines and their gateway, at which rollouts are opened.

    Its spans wait in an outbox for the run.
    """

    def __init__(
        self,
        spec: SamplerSpec,
        host: str,
        first_sequence: int,
        policies: Sequence[tuple[int, Sequence[HostWeights]]],
        initial: HostWeights | None,
    ) -> None:
        """`policies` has the version and the weights of each, or of the only one."""
        self._spec = spec
        mesh = serving_mesh(spec.mesh_config(), MeshConfig())
        programs = make_programs(spec.config, spec.serve, dtype=spec.dtype, mesh=mesh)
        make = partial(Engine, serve=spec.serve, programs=programs)
        self._engines = [make(self._model(*sent), version=version) for version, sent in policies]
        frozen = None if initial is None else make(self._model(initial))
        self._all = self._engines if frozen is None else [*self._engines, frozen]
        self._outbox = Outbox(first_sequence)
        super().__init__(
            Gateway(
                self._responders(self._engines),
                self._outbox,
                serve=replace(spec.serve, host=host, port=0),
                routing=spec.routing,
                initial=None if frozen is None else self._responders([frozen] * len(policies)),
            )
        )
        self._at_end = AsyncExitStack()

    def _model(self, *sent: HostWeights) -> LoadedModel:
        spec = self._spec
        return LoadedModel(spec.name, spec.config, params_from_host(*sent), spec.tokenizer)

    def _responders(self, engines: Sequence[Engine]) -> Engine | LoopsByPolicy:
        return LoopsByPolicy(engines) if self._spec.by_policy else engines[0]

    async def start(self) -> dict[str, float]:
        """Start to serve. Return the counters."""
        for engine in self._all:
            self._at_end.callback(engine.close)
        self._at_end.push_async_callback(self.gateway.close)
        self._at_end.callback(self._outbox.close)
        await self.gateway.start()
        for engine in self._all:
            engine.start(self._spec.num_requests)
        return self.gateway.stats()

    async def stop(self) -> None:
        """Stop to serve."""
        await self._at_end.aclose()

    async def close(self, rollout_id: str) -> Traffic:
        """Close a rollout, and return its traffic once the run has its spans."""
        traffic = await super().close(rollout_id)
        await asyncio.sleep(0)  # cancelled calls record their end
        await self._outbox.empty()
        return traffic

    async def load(self, index: int, sent: HostWeights | None, version: int) -> int:
        """Serve the new weights of a policy from the next decode step on. Return their version.

        With None the weights stay the same under the new version.
        """
        params = None if sent is None else params_from_host(sent)
        await asyncio.to_thread(self._engines[index].publish, params, version)
        return self._engines[index].version

    async def take(self, receipts: Sequence[Receipt]) -> Parcel:
        """Return the next spans for the store, with the counters. See `Outbox.take`."""
        return Parcel(await self._outbox.take(receipts), self.gateway.stats())
