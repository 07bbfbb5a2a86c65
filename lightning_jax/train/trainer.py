"""Training loop: collect rollouts, assign credit, batch, update, publish the weights, evaluate.

`train` runs it from the current state of a run directory to `config.total_steps`:

    run_dir/config.yaml     the resolved settings
    run_dir/sources.json    digests of the agent's file and the tasks
    run_dir/store.sqlite    every rollout and every span
    run_dir/checkpoints/    params, optimizer state, positions in the task pipelines
    run_dir/run.lock        lock of the process that uses the directory
    run_dir/metrics.jsonl   a row per step: row s is about weights version s and its update
    run_dir/curves.png      plot of the metrics, redrawn every half minute at most and at the end
    run_dir/policy/         the trained policy as a Hugging Face directory
    run_dir/policy_adapter/ its adapters alone, in peft's format, if model.lora has them
                            (with several policies, each has a subdirectory of its name in both)

Version s of the weights is the result of s trainer steps. A step makes one optimizer update, or
more if `algorithm.num_epochs` and `num_minibatches` say so. After a crash the loop resumes from the
newest checkpoint. The rollouts of repeated steps come from the store and are not sampled twice.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_jax.engine.by_policy import LoopsByPolicy
from lightning_jax.engine.engine import Engine, make_programs
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.routing import Routing
from lightning_jax.models.config import AUTO
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.models.lora import adapted
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.sharding import serving_mesh
from lightning_jax.rl.choices import load_choices
from lightning_jax.rollouts.collect import with_ids
from lightning_jax.rollouts.event_loop import isolate_agent
from lightning_jax.rollouts.program import make_agent
from lightning_jax.rollouts.runner import AgentFunction, Runner, as_agent
from lightning_jax.settings import ConfigError, changed_keys, load_config, save_config
from lightning_jax.system.descriptors import limit_of_files, number_free
from lightning_jax.system.files import make_private, warn_if_open
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.convert import COLDEST
from lightning_jax.traces.store import Store
from lightning_jax.train import multihost
from lightning_jax.train.config import Config
from lightning_jax.train.memory import plan
from lightning_jax.train.monitors import summary
from lightning_jax.train.resume import changed_sources, digests, save_sources
from lightning_jax.train.run import Run
from lightning_jax.train.runtime import freeze_objects
from lightning_jax.train.state import Replica
from lightning_jax.types import Task

log = logging.getLogger(__name__)

# Descriptors that this process needs per agent: both ends of a few connections, or the pipes of a
# program and one end, and an event loop.
FILES_PER_AGENT = 8

# Settings that may change when a run resumes while stored rollouts stay valid.
HARMLESS = (
    "run_dir", "num_steps", "eval.", "checkpoint.", "serve.", "rollout.concurrency",
    "rollout.retry_delay_s", "rollout.max_retry_delay_s", "mesh.", "distributed.",
    "agent.max_processes", "agent.memory_mib",
)  # fmt: skip

# Settings that affect a step's update but not the rollouts of existing weights.
LEARNING = ("optimizer.", "algorithm.", "batch.", "warmup.", "model.remat")


async def train(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
) -> list[dict[str, float | int]]:
    """Run or resume a run to its end and return the rows of its metrics file.

    `agent` is a function (task, llm) that returns the reward, by default the one that `config`
    names. In a run of several processes all of them call this, and only process 0 returns rows.
    """
    multihost.join(config.distributed)
    if not multihost.is_leader():
        await _follow(_with_dtypes(config))
        return []
    _check_files(config)
    _tell_of_bias(config)
    async with (
        multihost.cancel_on_stop(),
        open_run(config, train_tasks, dev_tasks, agent=agent) as run,
    ):
        with (
            logging_redirect_tqdm(),
            tqdm(
                total=config.total_steps,
                initial=run.step,
                desc="steps",
                unit="step",
                disable=None,  # without a terminal, the log lines are enough
            ) as bar,
        ):
            while run.step < config.total_steps:
                row = await run.one_step()
                bar.update()
                log.info("step %d: %s", run.step - 1, summary(row))
            if final := await run.evaluate_if_due():
                run.record(run.step, final)
                log.info("step %d: %s", run.step, summary(final))
        await run.save()
        await run_in_thread(run.export)
    return run.metrics.rows


async def _follow(config: Config) -> None:
    """Do the share of a process other than 0 in every update and checkpoint.

    If cancelled, ask process 0 to end the run, and return when it does.
    """

    def work() -> None:
        replica = Replica(config, _load(config))
        try:
            multihost.follow(replica)
        finally:
            replica.close()

    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.to_thread(multihost.ask_to_stop)
        await asyncio.wait({working})
        raise


@asynccontextmanager
async def open_run(
    config: Config,
    train_tasks: Sequence[Task],
    dev_tasks: Sequence[Task],
    *,
    agent: AgentFunction | None = None,
) -> AsyncIterator["Run"]:
    """Yield a run at the current step of its directory, with its server running.

    Everything is closed at the end.
    """
    _check_orchestrator(config)
    made = make_agent(config.agent) if agent is None else as_agent(agent)
    algorithm = load_choices(config.algorithm)
    train_tasks, dev_tasks = with_ids(train_tasks), with_ids(dev_tasks)
    directory = Path(config.run_dir)
    async with AsyncExitStack() as at_end:  # last in, first out
        at_end.enter_context(_alone_in(directory))  # before loading the model, which takes long
        config = _with_dtypes(config)
        source_digests = digests(config, train_tasks, dev_tasks, agent)
        changed = _changed_settings(config) + changed_sources(directory, source_digests)
        model = _model_that_fits(config)
        store = at_end.enter_context(closing(Store(directory / "store.sqlite")))
        mesh = serving_mesh(config.serve.mesh, config.mesh)
        programs = make_programs(model.config, config.serve, dtype=config.model.dtype, mesh=mesh)
        make_engine = partial(Engine, serve=config.serve, programs=programs)
        initial = None
        if any(role.served_by == "initial" for role in config.roles.values()):
            initial = make_engine(model)  # before the run takes ownership of the weights
        run = Run(replace(config, algorithm=algorithm), model, store, train_tasks, dev_tasks)
        at_end.push_async_callback(run.close)
        at_end.callback(run.leader.stop_followers)
        _supersede_stored(store, changed, run.step)
        save_config(config, directory / "config.yaml")
        save_sources(directory, source_digests)
        if abandoned := store.abandon_running():
            log.info(
                "%d rollouts were interrupted when the last process ended; running them again",
                abandoned,
            )
        run.leader.tell("publish_all")
        engines = [
            make_engine(
                replace(model, params=run.replica.states[name].policy),
                version=run.step,
                share_base=True,
            )
            for name in config.weights
        ]
        running = engines if initial is None else [*engines, initial]
        for engine in running:
            at_end.callback(engine.close)
        gateway = Gateway(
            _responders(config, engines),
            store,
            routing=Routing(config.roles, config.policies),
            initial=None if initial is None else _responders(config, [initial] * len(engines)),
        )
        at_end.push_async_callback(gateway.close)
        isolated = await at_end.enter_async_context(isolate_agent(made))
        await gateway.start()
        for engine in running:
            await run_in_thread(engine.warmup)
            engine.start()
        at_end.enter_context(freeze_objects())
        run.connect(engines, Runner(isolated, gateway, config.rollout, config.seed))
        yield run


def _tell_of_bias(config: Config) -> None:
    """Warn if rollouts are sampled from another distribution than the trained one.

    Gradients are those of the unfiltered policy at a call's temperature. Other samples bias them.
    """
    rollout = config.rollout
    exact = {
        "temperature": rollout.temperature is not None and rollout.temperature >= COLDEST,
        "top_p": rollout.top_p == 1.0,
        "top_k": rollout.top_k == 0,
    }
    named = [f"rollout.{name}" for name, is_exact in exact.items() if not is_exact]
    if config.num_steps and named:
        log.warning(
            "%s: rollouts may be sampled from a different distribution than the trained policy, "
            "which biases gradients; set a temperature of %s or more, top_p 1 and top_k 0 (see "
            "docs/algorithms.md)",
            ", ".join(named),
            COLDEST,
            extra={"event": "biased_sampling", "settings": named},
        )


def _check_files(config: Config) -> None:
    """Raise the limit of open files. Raises ConfigError if the agents need more."""
    rollout, free = config.rollout, number_free()
    in_a_step = max(rollout.tasks_per_step * rollout.group_size, config.eval.num_tasks)
    at_once = min(rollout.concurrency, in_a_step)
    if at_once * FILES_PER_AGENT > free:
        raise ConfigError(
            f"{at_once} concurrent agents need about {at_once * FILES_PER_AGENT} open files, but "
            f"only {max(free, 0)} of {limit_of_files()} are free; set "
            f"rollout.concurrency={max(free // FILES_PER_AGENT, 1)}, or raise the hard limit "
            "(ulimit -Hn).",
            reason="conflict",
            key="rollout.concurrency",
        )


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
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


def _with_dtypes(config: Config) -> Config:
    """Return the settings with dtypes in place of auto.

    A run that has begun keeps its first choice. With several processes nothing is measured, so the
    file is not read. One of them may be writing it.
    """
    model, saved = config.model, Path(config.run_dir) / "config.yaml"
    if model.dtype == AUTO and jax.process_count() == 1 and saved.exists():
        began = load_config(Config, [str(saved)], only=["model"]).model
        model = replace(model, dtype=began.dtype, activation_dtype=began.activation_dtype)
    return replace(config, model=resolve_dtype(model))


def _changed_settings(config: Config) -> list[str]:
    """Return the changed settings that make stored rollouts those of another run."""
    changed = changed_keys(Path(config.run_dir) / "config.yaml", config)
    return [key for key in changed if not key.startswith(HARMLESS)]


def _supersede_stored(store: Store, changed: Sequence[str], step: int) -> None:
    """Mark the stored rollouts of coming steps as those of another run if settings changed.

    The store is updated before the settings are saved, so that a crash in between does no harm.
    """
    if not changed:
        return
    first = step + all(key.startswith(LEARNING) for key in changed)
    store.supersede(first)
    log.warning(
        "changed since this run began: %s; the run resumes from step %d and discards stored "
        "rollouts of step %d and later",
        ", ".join(changed),
        step,
        first,
        extra={"event": "settings_changed", "changed": changed, "step": step},
    )


def _responders(config: Config, engines: Sequence[Engine]) -> Engine | LoopsByPolicy:
    """Return the gateway's view of the engines, of which there is one per set of weights."""
    return engines[0] if config.weights == ("",) else LoopsByPolicy(engines)


def _load(config: Config) -> LoadedModel:
    """Load the model, with all trained weights in float32.

    If rounded to bfloat16 first, a weight would have to move by half the grid spacing before any
    computation changed.
    """
    dtype = config.model.dtype if config.model.lora.rank else "float32"
    model = load_model(config.model.name, dtype, config.model.activation_dtype)
    return adapted(model, config.model.lora, config.seed, config.num_adapters)


def _model_that_fits(config: Config) -> LoadedModel:
    """Load the model. Raises ConfigError if the run would not fit in a device's memory."""
    model = _load(config)
    planned = plan.make_plan(model.config, config, plan.device_capacity())
    log.info("%s", plan.one_line(planned))
    if config.policies:  # shows a misspelled name, which makes one more policy
        words = (f"{k}" + " (frozen)" * (not v.trains) for k, v in config.policies.items())
        log.info("policies: %s", ", ".join(words))
    plan.check_plan(planned)
    return model


def _check_orchestrator(config: Config) -> None:
    """Raise ConfigError for a run that trains with JetStream, which cannot swap weights."""
    if config.serve.orchestrator != "native" and config.total_steps > 0:
        raise ConfigError(
            f"serve.orchestrator is {config.serve.orchestrator!r}, which cannot take new weights, "
            f"and {config.total_steps} steps are to be trained; set it to native, or set num_steps "
            "and warmup.num_steps to 0 to only evaluate.",
            reason="conflict",
            key="serve.orchestrator",
        )
