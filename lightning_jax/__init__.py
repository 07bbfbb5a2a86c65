"""Train any LLM agent with reinforcement learning, in JAX.

`import lightning_jax as lj` imports nothing else. Each name below loads its module when it is first
used. docs/python_api.md lists them.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_jax.cli.runtime import keep_compiled as keep_compiled
    from lightning_jax.cli.verify import verify as verify
    from lightning_jax.engine.config import ServeConfig as ServeConfig
    from lightning_jax.engine.engine import Engine as Engine
    from lightning_jax.engine.types import SamplingParams as SamplingParams
    from lightning_jax.errors import UserError as UserError
    from lightning_jax.gateway.app import Gateway as Gateway
    from lightning_jax.models.config import LoraConfig as LoraConfig
    from lightning_jax.models.config import MeshConfig as MeshConfig
    from lightning_jax.models.config import ModelConfig as ModelConfig
    from lightning_jax.models.formats.load import LoadedModel as LoadedModel
    from lightning_jax.models.formats.load import load_model as load_model
    from lightning_jax.models.formats.load import save_hf as save_hf
    from lightning_jax.models.lora import adapted as add_adapters  # noqa: F401
    from lightning_jax.models.lora import merged as merge_adapters  # noqa: F401
    from lightning_jax.rl import advantages as advantages
    from lightning_jax.rl import algorithms as algorithms
    from lightning_jax.rl import credit as credit
    from lightning_jax.rl import losses as losses
    from lightning_jax.rl.config import AlgorithmConfig as AlgorithmConfig
    from lightning_jax.rl.config import BatchConfig as BatchConfig
    from lightning_jax.rl.config import OptimizerConfig as OptimizerConfig
    from lightning_jax.rl.prepare import prepare_policies as prepare  # noqa: F401
    from lightning_jax.rl.sequence import TrainingSequence as TrainingSequence
    from lightning_jax.rl.update.learner import Learner as Learner
    from lightning_jax.rollouts.collect import run_rollouts as run_rollouts
    from lightning_jax.rollouts.config import JudgeConfig as JudgeConfig
    from lightning_jax.rollouts.config import RewardConfig as RewardConfig
    from lightning_jax.rollouts.config import RolloutConfig as RolloutConfig
    from lightning_jax.settings import ConfigError as ConfigError
    from lightning_jax.settings import load_config as load_config
    from lightning_jax.traces.store import Store as Store
    from lightning_jax.train.config import Config as Config
    from lightning_jax.train.loop.inference import evaluate as evaluate
    from lightning_jax.train.loop.startup import open_run as open_run
    from lightning_jax.train.loop.trainer import train as train
    from lightning_jax.train.memory.plan import plan_run as plan  # noqa: F401
    from lightning_jax.types import LLM as LLM
    from lightning_jax.types import Rollout as Rollout
    from lightning_jax.types import Span as Span
    from lightning_jax.types import Task as Task
    from lightning_jax.types import Trajectory as Trajectory
    from lightning_jax.types import Transition as Transition

# Module that defines each name, in the order of docs/python_api.md.
_MODULES = {
    # A loop of one's own.
    "load_model": "models.formats.load",
    "LoadedModel": "models.formats.load",
    "add_adapters": "models.lora",
    "merge_adapters": "models.lora",
    "Engine": "engine.engine",
    "SamplingParams": "engine.types",
    "Gateway": "gateway.app",
    "run_rollouts": "rollouts.collect",
    "prepare": "rl.prepare",
    "Learner": "rl.update.learner",
    "save_hf": "models.formats.load",
    "keep_compiled": "cli.runtime",
    # Algorithms.
    "algorithms": "rl.algorithms",
    "credit": "rl.credit",
    "advantages": "rl.advantages",
    "losses": "rl.losses",
    # A whole run.
    "train": "train",
    "evaluate": "train.loop.inference",
    "open_run": "train.loop.startup",
    "plan": "train.memory.plan",
    "verify": "cli.verify",
    # Settings.
    "load_config": "settings",
    "Config": "train.config",
    "ModelConfig": "models.config",
    "LoraConfig": "models.config",
    "MeshConfig": "models.config",
    "ServeConfig": "engine.config",
    "RolloutConfig": "rollouts.config",
    "RewardConfig": "rollouts.config",
    "JudgeConfig": "rollouts.config",
    "AlgorithmConfig": "rl.config",
    "OptimizerConfig": "rl.config",
    "BatchConfig": "rl.config",
    # Records.
    "Store": "traces.store",
    "Task": "types",
    "LLM": "types",
    "Rollout": "types",
    "Span": "types",
    "Transition": "types",
    "Trajectory": "types",
    "TrainingSequence": "rl.sequence",
    # Errors.
    "UserError": "errors",
    "ConfigError": "settings",
}
# Modules that are public themselves.
_WHOLE = ("algorithms", "credit", "advantages", "losses", "train")
_RENAMED = {
    "add_adapters": "adapted",
    "merge_adapters": "merged",
    "plan": "plan_run",
    "prepare": "prepare_policies",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        close = difflib.get_close_matches(name, _MODULES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = module if name in _WHOLE else getattr(module, _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
