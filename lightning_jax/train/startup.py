"""Construction of a run from its settings and its directory, in order: model, state, engines,
gateway, runner.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

from lightning_jax.engine.by_policy import LoopsByPolicy
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.replicas import replicate, split_by_data
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.routing import Routing
from lightning_jax.models.config import AUTO
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.models.lora import adapted
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.sharding import serving_mesh
from lightning_jax.rl.multi_policy.scope import ALL
from lightning_jax.rollouts.event_loop import isolate_agent
from lightning_jax.rollouts.program import make_agent
from lightning_jax.rollouts.runner import Runner
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.system.files import make_private, warn_if_open
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.memory import plan
from lightning_jax.train.multihost import Leader
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.train.resume import SETTINGS, digests, find_changes, save_changes
from lightning_jax.train.run import Run
from lightning_jax.train.runtime import freeze_objects
from lightning_jax.train.state import Replica
from lightning_jax.types import Task

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_run(
    config: Config, train_tasks: Sequence[Task], dev_tasks: Sequence[Task]
) -> AsyncIterator[Run]:
    """Yield a run at the current step of its directory, with its server running.

    Everything is closed at the end.
    """
    agent, loop_class = make_agent(config.agent), _loop_class(config)
    directory = Path(config.run_dir)
    async with AsyncExitStack() as at_end:  # last in, first out
        at_end.enter_context(_locked(directory))  # before loading the model, which takes long
        config = with_dtypes(config)
        sources = digests(config, train_tasks, dev_tasks)
        changed = find_changes(config, sources)
        model = _model_that_fits(config)
        store = at_end.enter_context(closing(Store(directory / "store.sqlite")))
        pipelines = Pipelines(config, model.tokenizer, train_tasks, dev_tasks)
        make_loop = _loop_maker(config, model, loop_class)
        initial = None
        if any(role.served_by == "initial" for role in config.roles.values()):
            initial = make_loop(model.params, 0)  # before the state takes ownership of the weights
        replica = Replica(config, model)
        at_end.callback(replica.close)
        leader = Leader(replica)
        at_end.callback(leader.stop_followers)
        if replica.progress:
            pipelines.restore(replica.progress)
        save_changes(store, config, sources, changed, replica.step)
        if abandoned := store.abandon_running():
            log.info(
                "%d rollouts were interrupted when the last process ended; running them again",
                abandoned,
            )
        leader.tell(Replica.publish_all)
        loops = [make_loop(state.policy, replica.step, share_base=True) for state in replica.states]
        running = loops if initial is None else [*loops, initial]
        for loop in running:
            at_end.callback(loop.close)
        gateway = Gateway(
            _responders(config, loops),
            model.tokenizer,
            store,
            model_name=model.name,
            serve=config.serve,
            routing=Routing(config.roles, config.policies),
            initial=None if initial is None else _responders(config, [initial] * len(loops)),
        )
        at_end.push_async_callback(gateway.close)
        agent = await at_end.enter_async_context(isolate_agent(agent))
        await gateway.start()
        for loop in running:
            await run_in_thread(loop.warmup)
            loop.start()
        at_end.enter_context(freeze_objects())
        runner = Runner(agent, gateway, store, config.rollout, config.seed)
        run = Run(config, model, pipelines, leader, loops, runner)
        at_end.push_async_callback(run.close)
        yield run


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory. Raises ConfigError if another process trains there."""
    make_private(directory)
    warn_if_open(directory)
    lock = FileLock(directory / "run.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"another process trains in {directory}; stop it, wait for it, or set another run_dir.",
            reason="locked",
            key="run_dir",
        ) from None
    except (OSError, NotImplementedError) as error:  # a file system without locks
        log.info("%s cannot be locked (%s); do not start a second run there", directory, error)
    try:
        yield
    finally:
        lock.release()


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
    """Load the model, with all trained weights in float32.

    If rounded to bfloat16 first, a weight would have to move by half the grid spacing before any
    computation changed.
    """
    dtype = config.model.dtype if config.model.lora.rank else "float32"
    model = load_model(config.model.name, dtype, config.model.activation_dtype)
    return adapted(model, config.model.lora, config.seed, config.num_adapters)


def _model_that_fits(config: Config) -> LoadedModel:
    """Load the model. Raises ConfigError if the run would not fit in a device's memory."""
    model = load_trainable(config)
    planned = plan.make_plan(model.config, config, plan.device_capacity())
    log.info("%s", plan.one_line(planned))
    if config.policies:  # shows a misspelled name, which makes one more policy
        words = (f"{k}" + " (frozen)" * (not v.trains) for k, v in config.policies.items())
        log.info("policies: %s", ", ".join(words))
    plan.check_plan(planned)
    return model


def _loop_class(config: Config) -> Callable[..., Any]:
    """Return the class that drives the engine.

    JetStream's cannot swap weights, so it only evaluates.
    """
    if config.serve.orchestrator == "native":
        return EngineLoop
    if config.total_steps > 0:
        raise ConfigError(
            f"serve.orchestrator is {config.serve.orchestrator!r}, which cannot take new weights, "
            f"and {config.total_steps} steps are to be trained; set it to native, or set num_steps "
            "and warmup.num_steps to 0 to only evaluate.",
            reason="conflict",
            key="serve.orchestrator",
        )
    from lightning_jax.engine.jetstream.loop import JetStreamLoop  # an optional dependency

    return JetStreamLoop


def _loop_maker(
    config: Config, model: LoadedModel, loop_class: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that makes the loop for one set of weights.

    All loops share the programs of the same engines.
    """
    serve, tokenizer = config.serve, model.tokenizer
    engines = [
        Engine(model.config, serve, dtype=config.model.dtype, mesh=mesh)
        for mesh in split_by_data(serving_mesh(serve.mesh, config.mesh))
    ]

    def make_loop(params: Any, version: int, *, share_base: bool = False) -> Any:
        params = engines[0].spread(params, share_base=share_base)

        def make_replica(engine: Engine) -> Any:
            return loop_class(engine, params, version, tokenizer, serve)

        return replicate(make_replica, engines, serve.slots)

    return make_loop


def _responders(config: Config, loops: Sequence[Any]) -> Any:
    """Return the gateway's view of the loops, of which there is one per weight scope."""
    return loops[0] if config.weight_scopes == (ALL,) else LoopsByPolicy(loops)
