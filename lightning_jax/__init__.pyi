# The public names, in the order of docs/python_api.md. Type checkers read this file, and
# __init__.py loads a name from the module that its line imports it from.
# ruff: noqa: I001

# A loop of one's own.
from lightning_jax.models.formats.load import load_model as load_model
from lightning_jax.models.formats.load import LoadedModel as LoadedModel
from lightning_jax.models.lora import adapted as add_adapters
from lightning_jax.models.lora import merged as merge_adapters
from lightning_jax.engine.engine import Engine as Engine
from lightning_jax.engine.types import SamplingParams as SamplingParams
from lightning_jax.gateway.app import Gateway as Gateway
from lightning_jax.rollouts.collect import run_rollouts as run_rollouts
from lightning_jax.rl.prepare import prepare_policies as prepare
from lightning_jax.rl.update.learner import Learner as Learner
from lightning_jax.models.formats.load import save_hf as save_hf
from lightning_jax.cli.runtime import keep_compiled as keep_compiled

# Algorithms.
from lightning_jax.rl import algorithms as algorithms
from lightning_jax.rl import credit as credit
from lightning_jax.rl import advantages as advantages
from lightning_jax.rl import losses as losses

# A whole run.
from lightning_jax.train.loop.trainer import train as train
from lightning_jax.train.loop.inference import evaluate as evaluate
from lightning_jax.train.loop.startup import open_run as open_run
from lightning_jax.train.memory.plan import plan_run as plan
from lightning_jax.cli.verify import verify as verify

# Settings.
from lightning_jax.settings import load_config as load_config
from lightning_jax.train.config import Config as Config
from lightning_jax.models.config import ModelConfig as ModelConfig
from lightning_jax.models.config import LoraConfig as LoraConfig
from lightning_jax.models.config import MeshConfig as MeshConfig
from lightning_jax.engine.config import ServeConfig as ServeConfig
from lightning_jax.rollouts.config import RolloutConfig as RolloutConfig
from lightning_jax.rollouts.config import RewardConfig as RewardConfig
from lightning_jax.rollouts.config import JudgeConfig as JudgeConfig
from lightning_jax.rl.config import AlgorithmConfig as AlgorithmConfig
from lightning_jax.rl.config import OptimizerConfig as OptimizerConfig
from lightning_jax.rl.config import BatchConfig as BatchConfig

# Records.
from lightning_jax.traces.store import Store as Store
from lightning_jax.types import Task as Task
from lightning_jax.types import LLM as LLM
from lightning_jax.types import Rollout as Rollout
from lightning_jax.types import Span as Span
from lightning_jax.types import Transition as Transition
from lightning_jax.types import Trajectory as Trajectory
from lightning_jax.rl.sequence import TrainingSequence as TrainingSequence

# Errors.
from lightning_jax.errors import UserError as UserError
from lightning_jax.settings import ConfigError as ConfigError

# Type checkers take a renamed import for private unless it is listed here.
__all__ = ["add_adapters", "merge_adapters", "plan", "prepare"]
