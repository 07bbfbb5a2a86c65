"""Settings of agents and their rollouts."""

import re
import shlex
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from lightning_jax.errors import FieldError, InvalidValue
from lightning_jax.schema import (
    Count,
    Finite,
    FiniteNonNegative,
    FunctionRef,
    Natural,
    PathKind,
    Positive,
    ProgramPath,
    Section,
    Share,
    require,
)
from lightning_jax.settings import ConfigError


@dataclass(frozen=True)
class AgentConfig(Section):
    """Program to train. docs/agents.md describes its input and output."""

    # FILE:FUNCTION, (task, llm) -> reward. The function may be a coroutine function. A run needs
    # this or `command`.
    function: FunctionRef | None = None
    # Interpreter that runs `function` in a process with its own packages. None: this process.
    python: ProgramPath | None = None
    # Command line, as a string or a list of words, to run for each rollout instead of `function`.
    command: Annotated[Any, PathKind.COMMAND] = None
    # For a command: FILE:FUNCTION, (task, output) -> reward. None: the last line of the output.
    reward: FunctionRef | None = None
    # The agent's own settings: keyword arguments of `function`, or LIGHTNING_OPTIONS of a command.
    options: dict[str, Any] = field(default_factory=dict)
    # Environment variables for a program, in addition to docs/agents.md: NAME to pass on the
    # trainer's value, or NAME=value.
    env: tuple[str, ...] = field(default=(), repr=False)
    # Limits of one program, including all processes it starts. A program above a limit is killed.
    max_processes: Count = 1024
    memory_mib: Positive | None = None  # total resident memory; None: no limit
    # Processes of this machine that run the agent instead of the trainer's. None: none on a CPU;
    # where a GPU or TPU serves, one for four cores, at most four.
    workers: Natural | None = None
    # Run agents only in workers that `lightning-jax worker` starts, on any machine, and in those of
    # `workers`.
    remote_workers: bool = False
    lease_s: Positive = 30.0  # without a heartbeat, after which a worker's rollouts run elsewhere

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", tuple(self.env))
        if not all(map(_VARIABLE.match, self.env)):
            names = [variable.partition("=")[0] for variable in self.env]  # the values are secret
            raise FieldError(
                f"env has {names}; expected variable names, optionally with =VALUE. Replace any "
                "??? of a saved file.",
                reason="invalid",
                key="env",
            )
        command = self.command
        if isinstance(command, str):
            object.__setattr__(self, "command", _words(command))
        elif isinstance(command, list):
            object.__setattr__(self, "command", tuple(str(word) for word in command))
        super().__post_init__()
        require(
            self,
            function=(
                self.function is None or ":" in self.function,
                "FILE:FUNCTION, such as agent.py:run",
            ),
            python=(
                self.python is None or command is None,
                "none with agent.command, whose first word is the program",
                "conflict",
            ),
            command=(
                self.command is None or (isinstance(self.command, tuple) and any(self.command[:1])),
                "a command line, such as 'node agent.mjs', or a list of its words",
            ),
            reward=(
                self.reward is None or (":" in self.reward and command is not None),
                "FILE:FUNCTION with agent.command only; agent.function returns its own reward",
            ),
        )


def require_agent(agent: AgentConfig) -> None:
    """Raise ConfigError if the settings name no agent."""
    if agent.function is None and agent.command is None:
        raise ConfigError(
            "no agent is named; set agent.function to FILE:FUNCTION, such as agent.py:run, or "
            "agent.command to a command line.",
            reason="missing",
            key="agent.function",
        )


_VARIABLE = re.compile(r"[A-Za-z_]\w*(=(?!\?\?\?$)[^\0]*)?\Z", re.ASCII | re.DOTALL)


def _words(line: str) -> tuple[str, ...]:
    """Split a command line into words as a shell does."""
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise InvalidValue(
            f"agent.command {line!r} cannot be split into words: {error}.",
            reason="unbalanced_quotes",
            key="agent.command",
        ) from None


@dataclass(frozen=True)
class RolloutConfig(Section):
    """Settings of rollouts: how many, for how long, and how they sample."""

    tasks_per_step: Count = 8  # each is attempted group_size times
    group_size: Count = 4  # rollouts of one task in one step
    concurrency: Count = 16  # rollouts running at once
    timeout_s: Positive = 120.0  # limit of a rollout; beyond it the agent has failed
    call_timeout_s: Positive = 60.0  # limit of an LLM call; beyond it the infrastructure has failed
    max_attempts: Count = 3  # attempts per rollout when the infrastructure fails
    # Wait before the second attempt. It doubles with each. Up to half of it is added at random, so
    # that rollouts do not all retry at once.
    retry_delay_s: FiniteNonNegative = 2.0
    max_retry_delay_s: FiniteNonNegative = 60.0  # limit of the doubled wait
    agent_failure_reward: Finite | None = 0.0  # None: do not train on rollouts of failed agents
    # Maximum magnitude of a rollout's reward, and of the total reward of one call. More fails the
    # agent.
    max_abs_reward: Annotated[float, Gt(0), Le(1e30)] = 1e6
    # Numbers to keep per rollout in addition to the reward, and distinct ones in a metrics row.
    max_metrics: Natural = 100
    max_infrastructure_failures: Share = 0.2  # the run stops if a larger share of a step fails
    # The run stops if the agent fails for one reason in more than this share of a step's rollouts,
    # twice in a row. 1: never.
    max_agent_failures: Share = 0.5
    # Sampling in training rollouts, overriding the agent's request. None: as the agent asks.
    temperature: Annotated[float, Ge(0), Le(10)] | None = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] | None = 1.0  # like temperature; 1: all tokens
    top_k: Natural | None = 0  # like temperature; 0: all tokens
    max_tokens: Count | None = None  # upper limit, not an override
    max_spans: Natural = 10_000  # spans an agent may post per rollout, including rewards of calls
    max_spans_mib: FiniteNonNegative = 64.0  # size of posted spans in the store

    def __post_init__(self) -> None:
        super().__post_init__()
        is_above = self.max_retry_delay_s >= self.retry_delay_s
        require(self, max_retry_delay_s=(is_above, "at least rollout.retry_delay_s"))
