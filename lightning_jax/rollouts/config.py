"""Settings of agents and their rollouts."""

import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.errors import FieldError, InvalidValue, require


@dataclass(frozen=True)
class AgentConfig:
    """Program to train. docs/agents.md describes its input and output."""

    # FILE:FUNCTION, (task, llm) -> reward. The function may be a coroutine function.
    function: str = "agents/spider_sql.py:run"
    # Interpreter that runs `function` in a process with its own packages. None: this process.
    python: str | None = None
    # Command line, as a string or a list of words, to run for each rollout instead of `function`.
    command: Any = None
    # For a command: FILE:FUNCTION, (task, output) -> reward. None: the last line of the output.
    reward: str | None = None
    # Environment variables for a program, in addition to docs/agents.md: NAME to pass on the
    # trainer's value, or NAME=value.
    env: tuple[str, ...] = field(default=(), repr=False)
    # Limits of one program, including all processes it starts. A program above a limit is killed.
    max_processes: int = 1024
    memory_mib: float | None = None  # total resident memory; None: no limit

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
        require(
            self,
            function=(":" in self.function, "FILE:FUNCTION, such as agents/spider_sql.py:run"),
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
            max_processes=(self.max_processes >= 1, "at least 1"),
            memory_mib=(self.memory_mib is None or self.memory_mib > 0, "above 0, or none"),
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
class RolloutConfig:
    """Settings of rollouts: how many, for how long, and how they sample."""

    tasks_per_step: int = 8
    group_size: int = 4  # rollouts of one task in one step
    concurrency: int = 16  # rollouts running at once
    timeout_s: float = 120.0  # limit of a rollout; beyond it the agent has failed
    call_timeout_s: float = 60.0  # limit of an LLM call; beyond it the infrastructure has failed
    max_attempts: int = 3  # attempts per rollout when the infrastructure fails
    # Seconds before the second attempt. The wait doubles up to the maximum. Up to half of it is
    # added at random, so that rollouts do not all retry at once.
    retry_delay_s: float = 2.0
    max_retry_delay_s: float = 60.0
    agent_failure_reward: float | None = 0.0  # None: do not train on rollouts of failed agents
    # Maximum magnitude of a rollout's reward, and of the total reward of one call. More fails the
    # agent.
    max_abs_reward: float = 1e6
    # Numbers to keep per rollout in addition to the reward, and distinct ones in a metrics row.
    max_metrics: int = 100
    max_infrastructure_failures: float = 0.2  # the run stops if a larger share of a step fails
    # Sampling in training rollouts, overriding the agent's request. None: as the agent asks.
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None  # upper limit, not an override
    max_spans: int = 10_000  # spans an agent may post per rollout, including rewards of calls
    max_spans_mib: float = 64.0  # size of posted spans in the store

    def __post_init__(self) -> None:
        require(
            self,
            max_spans=(self.max_spans >= 0, "at least 0"),
            max_spans_mib=(0 <= self.max_spans_mib < math.inf, "a number of MiB, 0 or more"),
            tasks_per_step=(self.tasks_per_step >= 1, "at least 1"),
            group_size=(self.group_size >= 1, "at least 1"),
            concurrency=(self.concurrency >= 1, "at least 1"),
            max_attempts=(self.max_attempts >= 1, "at least 1"),
            retry_delay_s=(0 <= self.retry_delay_s < math.inf, "0 or more seconds"),
            max_retry_delay_s=(
                self.retry_delay_s <= self.max_retry_delay_s < math.inf,
                "at least rollout.retry_delay_s",
            ),
            max_abs_reward=(0 < self.max_abs_reward <= 1e30, "above 0 and at most 1e30"),
            max_metrics=(self.max_metrics >= 0, "0 or more"),
            timeout_s=(self.timeout_s > 0, "a positive number of seconds"),
            call_timeout_s=(self.call_timeout_s > 0, "a positive number of seconds"),
            agent_failure_reward=(
                self.agent_failure_reward is None or math.isfinite(self.agent_failure_reward),
                "a finite number, or none",
            ),
            max_infrastructure_failures=(
                0 <= self.max_infrastructure_failures <= 1,
                "a share from 0 to 1",
            ),
            temperature=(
                self.temperature is None or 0 <= self.temperature <= 10,
                "0 to 10, or none",
            ),
            top_p=(self.top_p is None or 0 < self.top_p <= 1, "above 0 and up to 1, or none"),
            top_k=(self.top_k is None or self.top_k >= 0, "0 (all) or more, or none"),
            max_tokens=(self.max_tokens is None or self.max_tokens >= 1, "at least 1, or none"),
        )
