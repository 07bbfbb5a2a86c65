"""Construction of a run from its settings and its directory, in order: model, state, engines,
gateway, runner.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from aiohttp import web

from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.http.server import local_url
from lightning_jax.gateway.sessions.open_rollouts import ReadActivity
from lightning_jax.models.config import AUTO
from lightning_jax.models.formats.load import LoadedModel, ModelReader, open_configured
from lightning_jax.models.lora import adapted, adapted_shape, adapters_beside
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import param_shardings
from lightning_jax.rl.choices import load_choices
from lightning_jax.rollouts.agents.event_loop import isolate_agent
from lightning_jax.rollouts.agents.functions import Agent, AgentFunction
from lightning_jax.rollouts.collect import with_ids
from lightning_jax.rollouts.rewards.scoring import make_scorer
from lightning_jax.rollouts.runner import Runner
from lightning_jax.rollouts.servers import RolloutServer
from lightning_jax.rollouts.workers.pool import OtherMachines, open_workers
from lightning_jax.settings import ConfigError, changed_keys, load_config
from lightning_jax.system.memory import freeze_objects, return_freed_memory
from lightning_jax.system.network import go_direct
from lightning_jax.system.process_state import kept_process
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import METRICS, SETTINGS, STORE, locked, with_fixed_paths
from lightning_jax.train.hook import Hook
from lightning_jax.train.loop.agent_choice import choose_agent
from lightning_jax.train.loop.collect import Collector
from lightning_jax.train.loop.groups import untaken_ids
from lightning_jax.train.loop.hooks import CompileAhead, UserHook
from lightning_jax.train.loop.run import Run
from lightning_jax.train.loop.serving import ServedWeights, prepare_serving, requests_at_once
from lightning_jax.train.memory import plan
from lightning_jax.train.memory.cache_size import size_for_run
from lightning_jax.train.prompts.chosen import forget_chosen, present_prompts, read_chosen
from lightning_jax.train.prompts.search import PromptSearch, check_search
from lightning_jax.train.sinks import check_sinks
from lightning_jax.train.sinks.otlp_client import check_traces
from lightning_jax.train.sinks.traces import TracedRollouts, open_traces
from lightning_jax.train.state.multihost import Leader, agree_on_remat
from lightning_jax.train.state.replica import Replica
from lightning_jax.train.state.resume import digests, find_changes, resume
from lightning_jax.train.tasks.hints import Hints, TeacherWeights, make_hints
from lightning_jax.train.tasks.pipelines import Pipelines, no_tasks
from lightning_jax.train.tasks.stored import Stored
from lightning_jax.train.watch.metrics import MetricsLog
from lightning_jax.train.watch.progress import Progress, count_work
from lightning_jax.train.watch.watches import (
    DropWatch,
    FiniteWatch,
    GamingWatch,
    LearningWatch,
    MismatchWatch,
    PackingWatch,
    UnusedWatch,
)
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

# Makes the page of a run directory that its server shows. The text is the key that it asks for.
MakePage = Callable[[Path, str, ReadActivity], web.Application]


@asynccontextmanager
async def open_run(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
    make_page: MakePage | None = None,
    stored: Stored | None = None,
) -> AsyncIterator[Run]:
    """Yield a run at the current step of its directory, with its server running.

    With `stored` it learns from that, and needs an agent only to evaluate. Everything is closed at
    the end.
    """
    _check_settings(config)
    async with AsyncExitStack() as at_end:  # last in, first out
        config = at_end.enter_context(guarded_process(config))
        train_tasks, dev_tasks = with_ids(train_tasks), with_ids(dev_tasks)
        if not train_tasks and stored is None and not config.agent.external:
            raise no_tasks()
        runs_agent = choose_agent(
            config.agent,
            agent,
            (*train_tasks, *dev_tasks),
            num_others=config.cluster.workers,
            is_needed=stored is None and not config.agent.external,
        )
        if runs_agent is None:
            log.info("no evaluations: nothing here runs the agent; set agent.function")
            dev_tasks = []
        check_search(config.prompt_search, train_tasks)
        user_hooks = [UserHook(reference, config) for reference in config.hooks]
        algorithm = load_choices(config.algorithm)
        directory = Path(config.run_dir)
        at_end.enter_context(locked(directory))  # before loading the model, which takes long
        config = with_dtypes(config)
        sources = digests(config, train_tasks, dev_tasks, agent)
        changed = find_changes(directory, changed_keys(directory / SETTINGS, config), sources)
        model, resolved = _model_that_fits(config)  # the settings that are saved keep `auto`
        store = at_end.enter_context(closing(Store(directory / STORE)))
        pipelines = Pipelines(config, model.tokenizer, train_tasks, dev_tasks, stored)
        hints = make_hints(config.distill.hint, model.tokenizer, train_tasks)
        serve = prepare_serving(size_for_run(resolved, model.config), model, store)
        replica = Replica(replace(resolved, algorithm=algorithm), model)
        at_end.callback(replica.close)
        leader = Leader(replica)
        at_end.callback(leader.stop_followers)
        pipelines.restore(replica.progress)
        forget_chosen(directory, changed, replica.step)  # first, as `resume` saves the settings
        resume(store, config, sources, changed, replica.step, untaken_ids(replica.progress))
        leader.tell(Replica.publish_all)
        served = await at_end.enter_async_context(serve(replica))
        if make_page is not None:
            add_page(make_page, directory, config.serve.api_key, served.gateway)
        return_freed_memory()  # copies of the weights on their way to the engines
        runner = await at_end.enter_async_context(
            open_service(
                *(served.gateway, runs_agent, config),
                num_requests=requests_at_once(config.rollout),
                server=served.server,
                others=served.workers,
            )
        )
        run = _make_run(leader, served.weights, pipelines, runner, train_tasks, hints, user_hooks)
        at_end.push_async_exit(lambda _, error, __: run.close(error))
        yield run


def _make_run(
    leader: Leader[Replica],
    served: ServedWeights,
    pipelines: Pipelines,
    runner: Runner,
    tasks: Sequence[Task],
    hints: Hints | None,
    user_hooks: Sequence[Hook],
) -> Run:
    """Make the run with all its hooks, in the order in which it calls them."""
    replica, config = leader.target, leader.target.config
    directory, num_warmup = Path(config.run_dir), config.warmup.num_steps
    runner.prompts.update(present_prompts(config.prompts, read_chosen(directory), replica.step))
    collector = Collector(config, pipelines, runner)
    metrics = MetricsLog(directory / METRICS, replica.step, config.metrics, config.eval.by)
    progress = Progress(lambda: count_work(runner.gateway.stats()))
    hooks = [
        metrics,
        progress,
        CompileAhead(replica, config.total_steps - replica.step),
        PromptSearch(
            *(config.prompt_search, runner, tasks, directory),
            range(num_warmup, config.total_steps),
            collector.begin_phase,
        ),
        TeacherWeights(config.distill, num_warmup, hints),
        FiniteWatch(replica.policies, config.algorithm.max_nonfinite_steps),
        PackingWatch(config.batch),
        DropWatch(config.batch),
        UnusedWatch(collector.reader, collector.groups.store, has_prompts=bool(config.prompts)),
        GamingWatch(config.rewards),
        LearningWatch(),
    ]
    if pipelines.stored_steps is None:  # else other weights have sampled
        hooks.append(MismatchWatch(config.model.dtype))
    hooks += user_hooks
    if runner.sink is not None and pipelines.stored_steps is None:
        hooks.append(TracedRollouts(runner.sink))  # last, when sequences change no more
    return Run(config, leader, served, collector, metrics, progress, hooks)


@contextmanager
def guarded_process(config: Config) -> Iterator[Config]:
    """Yield settings that hold whatever an agent does to this process, and restore that at the end.

    Paths are absolute, for agents that change the directory. Calls to the server go around proxies.
    Enter this before the agent is loaded.
    """
    with kept_process():
        go_direct(local_url((config.serve.host, 0)))
        yield with_fixed_paths(config)


@asynccontextmanager
async def open_service(
    gateway: Gateway,
    agent: Agent | int | None,
    config: Config,
    num_requests: int = 1,
    server: RolloutServer | None = None,
    others: OtherMachines | None = None,
) -> AsyncIterator[Runner]:
    """Start the gateway and its engine, and yield a runner of the agent, here or in workers.

    Without an agent, the runner only takes rollouts from outside.

    The engine begins to compile what `num_requests` need that arrive together. Both are closed at
    the end.
    """
    async with AsyncExitStack() as at_end:
        at_end.callback(gateway.engine.close)
        at_end.push_async_callback(gateway.close)
        if isinstance(agent, int):
            await gateway.start()  # which the workers call
            workers = open_workers(config.agent, agent, gateway, config.rollout, others)
            running = await at_end.enter_async_context(workers)
        else:
            isolated = isolate_agent(_no_agent if agent is None else agent)
            running = await at_end.enter_async_context(isolated)
            await gateway.start()
        gateway.engine.start(num_requests)
        at_end.enter_context(freeze_objects())
        store, decode = gateway.store, gateway.engine.tokenizer.decode
        assert store is not None, "rollouts are recorded"
        opened = open_traces(config.traces, store, gateway.engine.tokenizer, config.agent)
        traces = await at_end.enter_async_context(opened)
        scorer = make_scorer(config.rewards, store, decode, config.rollout, config.seed, gateway)
        yield Runner(
            running,
            gateway,
            config.rollout,
            config.seed,
            scorer,
            server,
            dict(config.prompts),
            config.is_judged,
            traces,
        )


def add_page(make_page: MakePage, directory: Path, key: str | None, gateway: Gateway) -> None:
    """Let the gateway show the page of a run, which always asks for a key.

    Agents share the gateway's port, and no key of a rollout opens the page. Without a key in the
    settings, the page has one of its own, which gives no right but to read.
    """
    page_key = key or secrets.token_urlsafe(24)
    login = " (its key is serve.api_key)" if key else f"#key={page_key}"
    gateway.show_page(make_page(directory, page_key, gateway.activity), login)


async def _no_agent(task: Task, llm: LLM) -> float:
    raise AssertionError("programs outside run the agent")


def with_dtypes(config: Config) -> Config:
    """Return the settings with dtypes in place of auto.

    A run that has begun keeps its first choice. With several processes nothing is measured, so the
    file is not read. One of them may be writing it.
    """
    model, saved = config.model, Path(config.run_dir) / SETTINGS
    if model.dtype == AUTO and jax.process_count() == 1 and saved.exists():
        began = load_config(Config, [str(saved)], only=["model"]).model
        model = replace(model, dtype=began.dtype, activation_dtype=began.activation_dtype)
    return replace(config, model=resolve_dtype(model))


def load_trainable(config: Config) -> LoadedModel:
    """Load the model into host memory, with all trained weights in float32."""
    return _adapted(config, _open_trainable(config).load())


def _open_trainable(config: Config) -> ModelReader:
    """Open the model, with all trained weights in float32.

    If rounded to bfloat16 first, a weight would have to move by half the grid spacing before any
    computation changed.
    """
    lora = config.model.lora
    dtype = config.model.dtype if lora.rank else "float32"
    opened = open_configured(replace(config.model, dtype=dtype))
    _with_adapters(config, opened.config)  # before the weights are read
    if dtype == "bfloat16" and adapters_beside(config.model.name):
        log.warning(
            "%s has adapters merged into its weights. They are rounded to bfloat16 here, which "
            "loses a part of what its run changed; set model.dtype=float32 to keep all of it",
            config.model.name,
        )
    return opened


def _with_adapters(config: Config, model: DecoderConfig) -> DecoderConfig:
    return adapted_shape(model, config.model.lora, config.policy_table.num_adapters)


def _adapted(config: Config, model: LoadedModel) -> LoadedModel:
    number = config.policy_table.num_adapters
    return adapted(model, config.model.lora, config.seed, number)


def _model_that_fits(config: Config) -> tuple[LoadedModel, Config]:
    """Load the model, and set what updates recompute, for all processes.

    A process that is alone reads each weight straight to its place on the trainer's devices. With
    several processes, all weights go to the host first, because the engines of the first process
    copy some of them without the other processes.

    Raises ConfigError if the run would not fit in a device's memory, before weights are read.
    """
    opened = _open_trainable(config)
    capacity, limit = plan.device_capacity(), plan.process_limit()
    planned = plan.make_plan(_with_adapters(config, opened.config), config, capacity, limit=limit)
    log.info("%s", plan.one_line(planned))
    if config.policies:  # shows a misspelled name, which makes one more policy
        words = (f"{k}" + " (frozen)" * (not v.trains) for k, v in config.policies.items())
        log.info("policies: %s", ", ".join(words))
    plan.check_plan(planned)
    is_alone = jax.process_count() == 1
    shardings = param_shardings(opened.config, make_mesh(config.mesh)) if is_alone else None
    model = _adapted(config, opened.load(shardings))
    return model, plan.with_remat(config, agree_on_remat(planned.remat))


def _check_settings(config: Config) -> None:
    """Raise ConfigError for settings that cannot be used together.

    A run that trains cannot serve with JetStream, which cannot swap weights. With `rollout.ahead`
    and several processes, the first serves as well, so its devices would start the programs of an
    update in another order than those of the others.
    """
    check_sinks(config.metrics.sinks)
    check_traces(config.traces)
    if config.serve.orchestrator != "native" and config.total_steps > 0:
        raise ConfigError.conflict(
            "serve.orchestrator",
            f"serve.orchestrator is {config.serve.orchestrator!r}, which cannot take new weights, "
            f"and {config.total_steps} steps are to be trained; set it to native, or set num_steps "
            "and warmup.num_steps to 0 to only evaluate.",
        )
    if config.cluster.trainers:
        raise ConfigError.conflict(
            "cluster.trainers",
            f"cluster.trainers is {config.cluster.trainers}, and only the command can start the "
            "trainer's processes again; run `lightning-jax train`, or set cluster.trainers=0.",
        )
    for key, value, fix in (
        ("learn.run", config.learn.run, ""),
        ("distill.teacher_url", config.distill.teacher_url, ", or distill.teacher to a model"),
    ):
        if value is not None and jax.process_count() > 1:
            raise ConfigError.conflict(
                key,
                f"{key} is set and the run has {jax.process_count()} processes, each of which "
                f"would read from it; set distributed.mode=none{fix}.",
            )
    if config.agent.external and (config.cluster.samplers or jax.process_count() > 1):
        raise ConfigError.conflict(
            "agent.external",
            "agent.external is true, and rollouts from outside need the engines in one process; "
            "set cluster.samplers=0 and distributed.mode=none.",
        )
    if config.rollout.ahead and jax.process_count() > 1 and not config.cluster.samplers:
        raise ConfigError.conflict(
            "rollout.ahead",
            f"rollout.ahead is {config.rollout.ahead} and the run has {jax.process_count()} "
            "processes, of which the first serves on devices that also train; set "
            "rollout.ahead=0, or let samplers of a cluster serve.",
        )
