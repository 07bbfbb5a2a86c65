"""Sampler: engines with a gateway of their own, in a process that the run does not share."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import jax

from lightning_jax.cluster.delivery import Outbox, Parcel, Receipt
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway, Traffic
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import INITIAL
from lightning_jax.models.reshard import HostWeights, params_from_host
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rollouts.servers import GatewayServer


@dataclass(frozen=True)
class SamplerSpec:
    """Model and settings that all samplers of a run serve, without the weights.

    `tensor` of a sampler's devices compute one request together, unless `serve.mesh` says
    otherwise.
    """

    name: str
    config: DecoderConfig
    tokenizer: Tokenizer
    serve: ServeConfig  # with the run's key
    dtype: str
    tensor: int
    routing: Routing
    num_requests: int  # that arrive together at one sampler

    def mesh_config(self) -> MeshConfig:
        """Return the mesh of a sampler in the devices that it sees."""
        if self.serve.mesh is not None:
            return self.serve.mesh
        is_cpu = jax.devices()[0].platform == "cpu"  # whose devices are simulated
        return MeshConfig(data=1 if is_cpu else -1, fsdp=1, tensor=1 if is_cpu else self.tensor)


class Sampler(GatewayServer):
    """Engines with a gateway that opens rollouts.

    Spans wait in an outbox until the run takes them.
    """

    def __init__(
        self,
        spec: SamplerSpec,
        host: str,
        first_sequence: int,
        weights: Sequence[tuple[int, Sequence[HostWeights]]],
    ) -> None:
        """`weights` has the version and the arrays for each index in `spec.routing.policies`."""
        self._spec = spec
        mesh = serving_mesh(spec.mesh_config(), MeshConfig())
        programs = make_programs(spec.config, spec.serve, dtype=spec.dtype, mesh=mesh)
        make = partial(Engine, serve=spec.serve, programs=programs)
        self._engine, *others = [make(self._model(*sent), version=v) for v, sent in weights]
        fixed = spec.routing.policies.row(INITIAL)
        for index, other in enumerate(others, 1):
            self._engine.add(other, are_counted=fixed is None or fixed.weights != index)
        self._outbox = Outbox(first_sequence)
        super().__init__(
            Gateway(
                self._engine,
                self._outbox,
                serve=replace(spec.serve, host=host, port=0),
                routing=spec.routing,
            )
        )
        self._at_end = AsyncExitStack()

    def _model(self, *sent: HostWeights) -> LoadedModel:
        spec = self._spec
        return LoadedModel(spec.name, spec.config, params_from_host(*sent), spec.tokenizer)

    async def start(self) -> dict[str, float]:
        """Start serving. Return the counters."""
        self._at_end.callback(self._engine.close)
        self._at_end.push_async_callback(self.gateway.close)
        self._at_end.callback(self._outbox.close)
        await self.gateway.start()
        self._engine.start(self._spec.num_requests)
        return self.gateway.stats()

    async def stop(self) -> None:
        """Stop serving."""
        await self._at_end.aclose()

    async def close(self, rollout_id: str) -> Traffic:
        """Close a rollout, and return its traffic once the run has its spans."""
        traffic = await super().close(rollout_id)
        await asyncio.sleep(0)  # cancelled calls record their end
        await self._outbox.empty()
        return traffic

    async def load(self, weights: int, sent: HostWeights | None, version: int) -> int:
        """Serve the new weights of a policy from the next decode step on. Return their version.

        With None the weights stay the same under the new version.
        """
        params = None if sent is None else params_from_host(sent)
        await asyncio.to_thread(self._engine.publish, params, version, weights)
        return version

    async def take(self, receipts: Sequence[Receipt]) -> Parcel:
        """Return the next spans for the store, and news of this moment. See `Outbox.take`."""
        deliveries = await self._outbox.take(receipts)
        return Parcel(deliveries, self.gateway.stats(), self.gateway.over())
