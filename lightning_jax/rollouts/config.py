"""Settings of agents and their rollouts."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lightning_jax.errors import FieldError, InvalidValue
from lightning_jax.rl.config import Choice, is_custom
from lightning_jax.schema import (
    Count,
    Finite,
    FiniteNonNegative,
    FunctionRef,
    Natural,
    NonNegative,
    PathKind,
    PathOrName,
    Positive,
    ProgramPath,
    Section,
    Share,
    is_plain_url,
    require,
)
from lightning_jax.settings import ConfigError
from lightning_jax.system.clock import backoff_s

MAX_VARIABLE = 2**17  # bytes of NAME=value and its terminator, a limit of Linux


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
    # Fields of a task that a command gets; `id` is always one. None: all, or where `reward` or a
    # component of `rewards` judges, all but those named like answers (docs/agents.md).
    task_fields: tuple[str, ...] | None = None
    # Which rewards and spans count that a program posts. auto: all, or none where `reward` or a
    # component of `rewards` judges. own: those sent to a URL that its tools do not get.
    posts: Literal["auto", "own", "all"] = "auto"
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
    # Without a heartbeat, after which a worker is silent. Its rollouts run elsewhere, and the run
    # ends and replaces it if it started it.
    lease_s: Positive = 30.0
    # Take training rollouts from programs outside, which open each with POST /v1/rollouts
    # (docs/howto/train_on_live_traffic.md). `function` or `command`, if set, only evaluates.
    external: bool = False
    idle_s: Positive = 300.0  # without a request, after which an external rollout expires

    @property
    def is_named(self) -> bool:
        """True if the settings name an agent that the run can start."""
        return self.function is not None or self.command is not None

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", tuple(self.env))
        if self.task_fields is not None:
            object.__setattr__(self, "task_fields", tuple(self.task_fields))
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
            task_fields=(
                self.task_fields is None or command is not None,
                "none without agent.command; a function gets the whole task",
                "conflict",
            ),
        )


def require_agent(agent: AgentConfig) -> None:
    """Raise ConfigError if the settings name no agent."""
    if not agent.is_named:
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
    # Groups beyond a step's that may run while the trainer works, which uses samples of older
    # weights. 0: rollouts and updates take turns.
    ahead: Natural = 0
    concurrency: Count = 16  # rollouts running at once
    # Limit of a rollout, without the time in which all its calls wait for a first token. Beyond it
    # the agent has failed.
    timeout_s: Positive = 120.0
    # Limit of a response, from its first token. Beyond it the response ends as "length". Also the
    # limit of the wait for the first token, beyond which the infrastructure has failed.
    call_timeout_s: Positive = 60.0
    max_attempts: Count = 3  # attempts per rollout when the infrastructure fails
    # Wait before the second attempt. It doubles with each. Up to half of it is added at random, so
    # that rollouts do not all retry at once.
    retry_delay_s: FiniteNonNegative = 2.0
    max_retry_delay_s: FiniteNonNegative = 60.0  # limit of the doubled wait
    # Reward of a rollout whose agent failed, or less: its return is at most the lowest of the step.
    # None: do not train on rollouts of failed agents.
    agent_failure_reward: Finite | None = 0.0
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

    def backoff_s(self, attempt: int) -> float:
        """Return the wait after a failed attempt, 1 or more, without the random part."""
        return backoff_s(attempt, self.retry_delay_s, self.max_retry_delay_s)


AGENT = "agent"  # component with the reward that the agent returned
PROMPT = "prompt"  # phase of the rollouts of a search for prompts
MEASURING = ("eval", PROMPT)  # phases that sample greedily, one attempt a task
INITIAL = "initial"  # served_by of a judge with the weights from the start of the run


@dataclass(frozen=True)
class JudgeConfig(Section):
    """Model that scores attempts over OpenAI's chat API.

    Without a rubric it compares all attempts of a group. With one it scores each attempt by itself.
    """

    # initial: weights from the start of the run; the name of a policy of the run; or the URL of an
    # OpenAI-compatible server, such as http://localhost:8000/v1.
    served_by: str = INITIAL
    served_model: str | None = None  # for a URL: model to request
    api_key_env: str | None = None  # for a URL: environment variable with the key
    rubric: PathOrName | None = None  # YAML file of weighted criteria; None: compare the attempts
    instructions: str = ""  # what makes an attempt good, in addition to the rubric
    reasons: bool = True  # ask for a sentence before each score
    repeats: Count = 1  # verdicts on the same attempts, whose mean counts
    # Verdicts on attempts with equal texts, at least `repeats`. Each such attempt asks for its own
    # until there are so many, and gets the mean of all.
    max_verdicts: Count = 8
    temperature: NonNegative = 0.0  # of the judge's samples
    max_tokens: Count = 1024  # of one verdict
    max_chars: Count = 8000  # of one attempt's text; the middle of a longer one is left out
    concurrency: Count = 8  # calls at once

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_served(self)
        require(
            self,
            temperature=(
                self.temperature > 0 or self.rubric is None or self.repeats == 1,
                "above 0 with a rubric and repeats above 1, or all verdicts would be equal",
                "conflict",
            ),
        )

    @property
    def is_url(self) -> bool:
        """True if another server answers."""
        return _is_url(self.served_by)


@dataclass(frozen=True)
class PromptSearchConfig(Section):
    """Search for better `prompts` between steps with GEPA (arXiv 2507.19457).

    A model reads rollouts and proposes prompts. The best replaces the present one if it also earns
    more on fresh tasks.
    """

    # Policy steps between two searches, of which the first comes before the first step. 0: none.
    every: Natural = 0
    max_rollouts: Count = 60  # of the proposals of one search
    num_train: Count = 8  # training tasks of a search whose rollouts are read
    num_dev: Count = 12  # other training tasks, which choose the best proposal
    # Further training tasks, which compare it with the present prompt: two rollouts each. All that
    # are left if there are fewer.
    num_fresh: Annotated[int, Ge(3)] = 128
    minibatch: Count = 3  # rollouts that the model reads before a proposal
    # Who proposes. initial: weights from the start of the run; the name of a policy of the run; or
    # the URL of an OpenAI-compatible server, such as http://localhost:8000/v1.
    served_by: str = INITIAL
    served_model: str | None = None  # for a URL: model to request
    api_key_env: str | None = None  # for a URL: environment variable with the key
    temperature: NonNegative = 1.0  # of the proposals
    max_tokens: Count = 1024  # of one proposal
    max_chars: Count = 8000  # of one prompt; longer proposals are refused

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_served(self)

    @property
    def is_url(self) -> bool:
        """True if another server answers."""
        return _is_url(self.served_by)


def _is_url(served_by: str) -> bool:
    return served_by.startswith(("http://", "https://"))


def _check_served(section: "JudgeConfig | PromptSearchConfig") -> None:
    """Raise ValueError unless the settings name a model and how to reach it."""
    require(
        section,
        served_by=(
            not section.is_url or is_plain_url(section.served_by),
            "initial, a policy, or an http(s) URL without a user, query or fragment",
        ),
        served_model=(
            section.is_url == (section.served_model is not None),
            "the model to request if served_by is a URL, else none",
        ),
        api_key_env=(
            section.api_key_env is None or section.is_url,
            "none, because only a URL needs a key",
        ),
    )


@dataclass(frozen=True)
class RewardConfig(Section):
    """Component of the reward of a rollout, which is the weighted sum of its components.

    The component `agent` is what the agent returned. Any other has exactly one source.
    """

    weight: Finite = 1.0  # 0: held out, that is stored and shown but not trained on
    # FILE:FUNCTION, (task, attempt) -> float; see docs/howto/rewards_from_judges.md. From Python
    # also a function. Coroutine functions are awaited.
    function: Choice | None = None
    # FILE:FUNCTION, (task, attempts) -> list of floats, for the scored attempts of a whole group.
    group: Choice | None = None
    judge: JudgeConfig | None = None  # a model that scores the attempts

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("function", "group"):
            value = getattr(self, name)
            is_function = value is None or is_custom(value)
            require(self, **{name: (is_function, "FILE:FUNCTION, or a function from Python")})

    @property
    def num_sources(self) -> int:
        return sum(value is not None for value in (self.function, self.group, self.judge))

    @property
    def needs_group(self) -> bool:
        """True if it scores the attempts of a group by comparing them."""
        return self.group is not None or (self.judge is not None and self.judge.rubric is None)


def key_of(model: JudgeConfig | PromptSearchConfig) -> str | None:
    """Return the key of a model's server. Raises ConfigError if the variable is not set."""
    if model.api_key_env is None:
        return None
    if key := os.environ.get(model.api_key_env):
        return key
    raise ConfigError(
        f"the environment variable {model.api_key_env} of a model's key is not set; set it.",
        reason="missing",
        key=model.api_key_env,
    )


def check_prompt_search(
    search: PromptSearchConfig,
    prompts: Mapping[str, str],
    agent: AgentConfig,
    rollout: RolloutConfig,
    policies: Mapping[str, object],
    rewards: Mapping[str, RewardConfig],
) -> None:
    """Raise ValueError for a search that cannot run, or a prompt that is no name with a text."""
    for name, text in prompts.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not text.strip():
            raise InvalidValue(
                f"prompts.{name} is {text!r}; expected a text, and a name of letters, digits, - "
                "and _.",
                reason="invalid",
                key=f"prompts.{name}",
            )
    # A search may make each prompt as long as `max_chars`.
    grown = {
        name: text.ljust(search.max_chars if search.every else 0) for name, text in prompts.items()
    }
    is_program = agent.command is not None or agent.python is not None
    if is_program and len("LIGHTNING_PROMPTS=") + len(json.dumps(grown)) >= MAX_VARIABLE:
        raise InvalidValue(
            f"prompts need {MAX_VARIABLE // 1024} KiB or more as JSON, too much for an environment "
            "variable of a program; shorten them, or lower prompt_search.max_chars.",
            reason="too_large",
            key="prompts",
        )
    if not search.every:
        return
    longest = max(prompts, key=lambda name: len(prompts[name]), default="")
    length = len(prompts.get(longest, ""))
    weighted = [reward for reward in rewards.values() if reward.weight]
    facts = {
        "prompts": (bool(prompts), "empty, so there is nothing to improve; add prompts"),
        f"prompts.{longest}": (
            length <= search.max_chars,
            f"{length} characters long; set prompt_search.max_chars to {length} or more",
        ),
        "rollout.agent_failure_reward": (
            rollout.agent_failure_reward is not None,
            "none, so a search cannot score an agent that fails; set a number",
        ),
        "rewards": (
            not weighted or not all(reward.needs_group for reward in weighted),
            "a sum of components that compare attempts, and a search makes one attempt at a task; "
            "add a component that scores each by itself",
        ),
        "agent.external": (
            not agent.external,
            "true, and the search runs the agent itself; set prompt_search.every=0",
        ),
        "rollout.ahead": (
            not rollout.ahead,
            f"{rollout.ahead}, so rollouts would begin before the prompt is chosen; set it to 0",
        ),
        "prompt_search.served_by": (
            search.is_url or search.served_by in (INITIAL, *policies),
            f"{search.served_by!r}; expected initial, a URL or a policy",
        ),
    }
    for key, (is_right, fact) in facts.items():
        if not is_right:
            raise InvalidValue(f"{key} is {fact}.", reason="conflict", key=key)


def check_rewards(rewards: Mapping[str, RewardConfig], policies: Mapping[str, object]) -> None:
    """Raise ValueError for a component without exactly one source, or with an unknown judge."""
    for name, reward in rewards.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise InvalidValue(
                f"rewards has the name {name!r}; expected letters, digits, - and _.",
                reason="invalid",
                key=f"rewards.{name}",
            )
        if reward.num_sources != (name != AGENT):
            expected = (
                "none, because it is what the agent returned"
                if name == AGENT
                else "exactly one of function, group and judge"
            )
            raise InvalidValue(
                f"rewards.{name} has {reward.num_sources} sources; expected {expected}.",
                reason="conflict",
                key=f"rewards.{name}",
            )
        judge = reward.judge
        if judge and not judge.is_url and judge.served_by not in (INITIAL, *policies):
            raise InvalidValue(
                f"rewards.{name}.judge.served_by is {judge.served_by!r}; expected initial, a URL"
                + "".join(f", {policy}" for policy in policies)
                + ".",
                reason="unknown",
                key=f"rewards.{name}.judge.served_by",
            )
    if rewards and not any(reward.weight for reward in rewards.values()):
        raise InvalidValue(
            f"rewards has only weights of 0 ({', '.join(rewards)}), so there is nothing to train "
            f"on; give one a weight, such as rewards.{AGENT}.weight=1.",
            reason="conflict",
            key="rewards",
        )
