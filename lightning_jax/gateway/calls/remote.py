"""Gateway whose calls all go to another server, so that no model is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from lightning_jax.engine.admission import LoopStatus
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import EngineError
from lightning_jax.engine.response import TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import FieldError
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.formats.find import tiny_tokenizer
from lightning_jax.models.policies import ALL, Policy
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.settings import ConfigError
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.roles import Roles


@dataclass(frozen=True)
class RemoteEngine:
    """Stand-in for the engine of a gateway that answers no calls itself.

    Its `remote_routing` sends them away, or the samplers answer whose `counters` it has.
    """

    model_name: str
    serve: ServeConfig = field(default_factory=ServeConfig)
    tokenizer: Tokenizer = field(default_factory=tiny_tokenizer)  # never reads a prompt
    version: int = 0
    status: LoopStatus = "ok"
    num_slots: int = 0
    counters: Callable[[], dict[str, float]] = dict

    def start(self, num_requests: int = 1) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, float]:
        return self.counters()

    async def prepare(self, grammar: str, owner: str = "") -> None:
        raise EngineError("no model is loaded; another server answers all calls.")

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        policy: Policy = ALL,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> NoReturn:
        raise EngineError("no model is loaded; another server answers all calls.")


def remote_role(url: str, api_key: str | None = None, model: str | None = None) -> RoleConfig:
    """Return the role of calls that the server at `url` answers, with the model `model`.

    If `model` is None, the server gets the name that the agent asks for. Raises ConfigError for an
    unusable URL.
    """
    try:
        role = RoleConfig(
            agent="*", trains=False, served_by=url, served_model=model, api_key=api_key or None
        )
    except FieldError:
        role = None
    if role is None or not role.is_external:
        raise ConfigError(
            f"the URL is {url!r}; expected the http(s) URL of an OpenAI-compatible server, such as "
            "http://localhost:8000/v1, without a user, query or fragment.",
            reason="invalid",
            key="url",
        )
    return role


def remote_routing(roles: Roles, server: RoleConfig) -> Routing:
    """Return the routing that sends to `server` all calls that a policy would answer."""

    def sent_away(role: RoleConfig) -> RoleConfig:
        if role.is_external:
            return role
        return replace(server, agent=role.agent, model=role.model, system=role.system)

    return Routing({name: sent_away(role) for name, role in roles.items()}, fallback=server)
