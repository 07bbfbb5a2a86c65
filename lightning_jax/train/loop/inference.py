"""Rollouts without training, on a policy or on another server. No run directory is written."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine, remote_routing
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.load import LoadedModel, as_policy_beside, open_configured
from lightning_jax.models.lora import adapted, open_policy, overlay, trained_part
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import TEACHER, PolicyTable
from lightning_jax.rollouts.agents.functions import AgentFunction
from lightning_jax.rollouts.collect import with_ids
from lightning_jax.rollouts.config import PromptSearchConfig
from lightning_jax.rollouts.results.failures import FailureWatch
from lightning_jax.rollouts.results.metrics import eval_metrics, eval_metrics_by
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.settings import ConfigError
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.store import Store, TemporaryStore
from lightning_jax.train.config import Config
from lightning_jax.train.directory import find_weights
from lightning_jax.train.loop.agent_choice import choose_agent
from lightning_jax.train.loop.serving import routing_of
from lightning_jax.train.loop.startup import (
    guarded_process,
    load_trainable,
    open_service,
    with_dtypes,
)
from lightning_jax.train.prompts.chosen import present_prompts, read_chosen
from lightning_jax.train.sinks.otlp_client import check_traces
from lightning_jax.train.state.checkpoint import Checkpointer
from lightning_jax.train.watch.progress import Progress, count_work, show_progress
from lightning_jax.types import Metrics, Rollout, Task

BAR = "{percentage:3.0f}%|{bar:20}|{postfix}"  # the postfix is `Progress.line`


@dataclass(frozen=True)
class PolicySource:
    """Weights or a server that answers an agent's calls.

    By default these are the weights that a run of the settings starts from. At most one field is
    set.
    """

    run_dir: Path | None = None  # the policy of this run; see `directory.find_weights`
    model: str | None = None  # a model in place of `model.name`
    server: RoleConfig | None = None  # see `gateway.remote.remote_role`

    def with_fixed_path(self) -> "PolicySource":
        """Return a source that is the same if foreign code changes the directory."""
        return replace(self, run_dir=self.run_dir and self.run_dir.absolute())

    def label(self, config: Config) -> str:
        """Return the policy's name for people."""
        if self.server is not None:
            named = self.server.served_model
            return f"{named} at {self.server.served_by}" if named else self.server.served_by
        if self.run_dir is not None:
            return str(find_weights(self.run_dir).path)
        return self.model or config.model.name

    def model_names(self, config: Config) -> list[str]:
        """Return the model of each policy of the settings, in order, or the only one.

        Raises ConfigError if the run has no trained policy that can be loaded.
        """
        if self.run_dir is not None:
            weights = find_weights(self.run_dir)
            if config.policies and not weights.is_exported:
                raise ConfigError(
                    f"run {self.run_dir} trains several policies and has not ended; let it end, "
                    "because its checkpoints cannot be evaluated.",
                    reason="not_exported",
                    key=str(self.run_dir),
                )
            return [str(weights.path / name) for name in config.policies or ("",)]
        if self.model is not None:
            return [self.model] * max(len(config.policies), 1)
        bases = [policy.base for policy in config.policies.values()] or [None]
        return [base or config.model.name for base in bases]

    @property
    def version(self) -> int:
        """Number of steps that trained the weights."""
        return 0 if self.run_dir is None else find_weights(self.run_dir).step


async def evaluate(
    config: Config,
    tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
    run_dir: Path | str | None = None,
    repeats: int = 1,
) -> tuple[list[Rollout], Metrics]:
    """Score a policy on tasks without training, and return (rollouts, metrics).

    The policy is the one that the run in `run_dir` trained, or its newest checkpoint if the run has
    not ended. By default it is the initial one of `config`.
    `agent` is by default the one that `config` names. Sampling is greedy, as in a run's
    evaluations, and metrics have the same names, such as `eval/reward_mean`. Nothing is kept on
    disk.

    Raises UserError if the agent, the tasks or the policy are unusable, or if the agent failed
    everywhere.
    """
    source = PolicySource(run_dir=None if run_dir is None else Path(run_dir))
    tasks = with_ids(tasks)
    with closing(TemporaryStore()) as store:
        async with open_runner(config, source, store, tasks, agent=agent) as runner:
            rollouts = await run_tasks(runner, tasks, "eval", 0, repeats)
        FailureWatch(store).observe(rollouts, "the evaluation")
    repeated = [task for task in tasks for _ in range(repeats)]
    return rollouts, eval_metrics(rollouts) | eval_metrics_by(config.eval.by, repeated, rollouts)


@asynccontextmanager
async def open_runner(
    config: Config,
    source: PolicySource,
    store: Store,
    tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
) -> AsyncIterator[Runner]:
    """Yield a runner of the agent whose calls `source` answers, recorded in the store.

    It is for these tasks. `agent` is by default the one that `config` names. Everything but the
    store is closed at the end. Raises UserError if the agent, the policy or the server's settings
    are unusable.
    """
    check_traces(config.traces)
    async with AsyncExitStack() as at_end:
        config = at_end.enter_context(guarded_process(config))
        source = source.with_fixed_path()
        runs_agent = choose_agent(config.agent, agent, tasks)
        config = replace(config, prompt_search=PromptSearchConfig())  # its model is not needed
        if source.server is not None:
            remote = RemoteEngine(source.label(config), config.serve)
            gateway = Gateway(remote, store, routing=remote_routing(config.roles, source.server))
        else:
            gateway = serve_policies(with_dtypes(config), source, store)
        service = open_service(gateway, runs_agent, config)
        runner = await at_end.enter_async_context(service)
        if source.run_dir is not None:
            chosen = read_chosen(source.run_dir)
            runner.prompts.update(present_prompts(config.prompts, chosen, source.version))
        yield runner


def serve_policies(config: Config, source: PolicySource, store: Store) -> Gateway:
    """Load the weights and return a gateway to them. The caller starts and closes its engine.

    Adapters are not stacked: each trained policy has its own weights, and before training adapters
    are zero. Policies with the same model share its weights.
    """
    routing, trained = routing_of(config), source.model_names(config)
    rows = [row for row in routing.policies.rows if row.name != TEACHER]
    names = trained + [config.model.name] * (len(rows) - len(trained))  # of fixed rows
    first, *others = distinct = list(dict.fromkeys(names))
    model = _load_first(config, source, first)
    mesh = serving_mesh(config.serve.mesh, config.mesh)
    programs = make_programs(model.config, config.serve, dtype=config.model.dtype, mesh=mesh)
    make_engine = partial(Engine, serve=config.serve, programs=programs)
    engine = make_engine(model, version=source.version)
    for name in others:
        is_trained = name in trained
        version = source.version if is_trained else 0
        other = make_engine(_load_beside(config, model, name), version=version)
        engine.add(other, are_counted=is_trained)
    rows = [
        replace(row, weights=distinct.index(name), adapter=None)
        for row, name in zip(rows, names, strict=True)
    ]
    return Gateway(engine, store, routing=replace(routing, policies=PolicyTable(tuple(rows))))


def _load_first(config: Config, source: PolicySource, name: str) -> LoadedModel:
    """Load the model of this name, which may be a checkpoint of the run."""
    if source.run_dir is None:
        return open_policy(replace(config.model, name=name)).load()
    weights = find_weights(source.run_dir)
    if weights.is_exported:
        return open_policy(_plain(config, name)).load()
    initial = load_trainable(config)
    with closing(Checkpointer(weights.path.parent, config.checkpoint)) as checkpointer:
        trained = checkpointer.restore_params(trained_part(initial.params), weights.step)
    return replace(initial, params=overlay(initial.params, trained))


def _load_beside(config: Config, model: LoadedModel, name: str) -> LoadedModel:
    """Load another policy of the run. If it has no adapters like `model`'s, it gets zero ones."""
    plain, lora = _plain(config, name), model.config.execution.lora
    opened = open_policy(plain)
    if opened.config.execution.lora not in (None, lora):
        opened = open_configured(plain)
    other = opened.load()
    if lora is not None and opened.config.execution.lora is None:
        other = adapted(other, lora)
    return as_policy_beside(model, other)


def _plain(config: Config, name: str) -> ModelConfig:
    """Return settings of a model whose template is its own, as an exported policy's is."""
    return replace(config.model, name=name, chat_template=None, chat_template_kwargs={})


async def run_tasks(
    runner: Runner, tasks: Sequence[Task], phase: str, step: int, group_size: int
) -> list[Rollout]:
    """Return `group_size` finished rollouts of each task, with the progress on the screen.

    Raises TooManyFailures if the infrastructure failed too often.
    """
    requests = make_requests(tasks, phase, step, group_size)
    progress = Progress(lambda: count_work(runner.gateway.stats()))
    progress.begin_phase(phase, len(requests))
    with (
        logging_redirect_tqdm(),
        tqdm(total=len(requests), disable=None, leave=False, bar_format=BAR) as bar,
    ):

        def count(rollout: Rollout) -> None:
            progress.rollout_ended(phase)
            bar.update()

        async with show_progress(progress, bar):
            rollouts = await run_requests(requests, runner, on_done=count)
    await runner.store.wait_for_spans()
    return rollouts
