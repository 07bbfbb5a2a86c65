"""Settings of agents and their rollouts."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from lightning_jax.models.policies import INITIAL
from lightning_jax.rl.config import Choice, is_custom
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import ModelServer
from lightning_jax.settings.schema import (
    PLAIN_URL,
    ClassRef,
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
    Rule,
    Section,
    Share,
    expect,
    is_plain_url,
    section,
)
from lightning_jax.system.clock import backoff_s

MAX_VARIABLE = 2**17  # bytes of NAME=value and its terminator, a limit of Linux


def _as_words(command: Any) -> Any:
    """Split a command line into words as a shell does."""
    if not isinstance(command, str):
        return command
    try:
        return shlex.split(command)
    except ValueError as error:
        expected = f"expected a command line that splits into words ({error})"
        raise PydanticCustomError("unbalanced_quotes", "{text}", {"text": expected}) from None


_VARIABLE = re.compile(r"[A-Za-z_]\w*(=(?!\?\?\?$)[^\0]*)?\Z", re.ASCII | re.DOTALL)
Variables = Annotated[
    tuple[str, ...],
    expect(
        lambda variables: all(map(_VARIABLE.match, variables)),
        "variable names, optionally with =VALUE. Replace any ??? of a saved file",
    ),
]
if TYPE_CHECKING:
    Command = Any
else:  # a line or its words, of which a tuple is made
    Command = (
        Annotated[
            tuple[str, ...],
            PathKind.COMMAND,
            BeforeValidator(_as_words),
            expect(lambda words: any(words[:1]), "a command line, such as 'node agent.mjs'"),
        ]
        | None
    )


@section
class AgentConfig(Section):
    """Program to train. docs/agents.md describes its input and output."""

    function: FunctionRef | None = None
    """FILE:FUNCTION, (task, llm) -> reward. The function may be a coroutine function. A run needs
    this or `command`."""
    python: ProgramPath | None = None
    """Interpreter that runs `function` in a process with its own packages. None: this process."""
    command: Command = None
    """Command line to run for each rollout instead of `function`, as a string or its words."""
    reward: FunctionRef | None = None
    """For a command: FILE:FUNCTION, (task, output) -> reward. None: the last line of the output."""
    task_fields: tuple[str, ...] | None = None
    """Fields of a task that a command gets; `id` is always one. None: all, or where `reward` or a
    component of `rewards` judges, all but those named like answers (docs/agents.md)."""
    posts: Literal["auto", "own", "all"] = "auto"
    """Which rewards and spans count that a program posts. auto: all, or none where `reward` or a
    component of `rewards` judges. own: those sent to a URL that its tools do not get."""
    options: dict[str, Any] = field(default_factory=dict)
    """The agent's own settings: keyword arguments of `function`, or LIGHTNING_OPTIONS of a
    command."""
    env: Variables = field(default=(), repr=False)
    """Environment variables for a program, in addition to docs/agents.md: NAME to pass on the
    trainer's value, or NAME=value."""
    max_processes: Count = 1024
    """Limit of one program, with all processes it starts. A program above a limit is killed."""
    memory_mib: Positive | None = None
    """Total resident memory; None: no limit."""
    workers: Natural | None = None
    """Processes of this machine that run the agent instead of the trainer's. None: none on a CPU;
    where a GPU or TPU serves, one for four cores, at most four."""
    remote_workers: bool = False
    """Run agents only in workers that `lightning-jax worker` starts, on any machine, and in those
    of `workers`."""
    lease_s: Positive = 30.0
    """Without a heartbeat, after which a worker is silent. Its rollouts run elsewhere, and the run
    ends and replaces it if it started it."""
    external: bool = False
    """Take training rollouts from programs outside, which open each with POST /v1/rollouts
    (docs/howto/train_on_live_traffic.md). `function` or `command`, if set, only evaluates."""
    idle_s: Positive = 300.0
    """Without a request, after which an external rollout expires."""

    @property
    def is_named(self) -> bool:
        """True if the settings name an agent that the run can start."""
        return self.function is not None or self.command is not None

    def rules(self) -> Iterator[Rule]:
        is_program = self.command is not None
        expected = "expected none with agent.command, whose first word is the program"
        yield "python", self.python is None or not is_program, expected
        expected = "expected none without agent.command; a function returns its own reward"
        yield "reward", self.reward is None or is_program, expected
        expected = "expected none without agent.command; a function gets the whole task"
        yield "task_fields", self.task_fields is None or is_program, expected


def require_agent(agent: AgentConfig) -> None:
    """Raise ConfigError if the settings name no agent."""
    if not agent.is_named:
        raise ConfigError.missing(
            "agent.function",
            "no agent is named; set agent.function to FILE:FUNCTION, such as agent.py:run, or "
            "agent.command to a command line.",
        )


@section
class RolloutConfig(Section):
    """Settings of rollouts: how many, for how long, and how they sample."""

    tasks_per_step: Count = 8
    """Each is attempted group_size times."""
    group_size: Count = 4
    """Rollouts of one task in one step."""
    ahead: Natural = 0
    """Groups beyond a step's that may run while the trainer works, which uses samples of older
    weights. 0: rollouts and updates take turns."""
    source: ClassRef | None = None
    """FILE:CLASS that decides which groups begin and which a step trains on; see
    docs/howto/change_scheduling.md. None: in order."""
    concurrency: Count = 16
    """Rollouts running at once."""
    timeout_s: Positive = 120.0
    """Limit of a rollout, without the time in which all its calls wait for a first token. Beyond it
    the agent has failed."""
    call_timeout_s: Positive = 60.0
    """Limit of a response, from its first token. Beyond it the response ends as "length". Also the
    limit of the wait for the first token, beyond which the infrastructure has failed."""
    max_attempts: Count = 3
    """Attempts per rollout when the infrastructure fails."""
    retry_delay_s: FiniteNonNegative = 2.0
    """Wait before the second attempt. It doubles with each. Up to half of it is added at random, so
    that rollouts do not all retry at once."""
    max_retry_delay_s: FiniteNonNegative = 60.0
    """Limit of the doubled wait."""
    agent_failure_reward: Finite | None = 0.0
    """Reward of a rollout whose agent failed, or less: its return is at most the lowest of the
    step. None: do not train on rollouts of failed agents."""
    max_abs_reward: Annotated[float, Gt(0), Le(1e30)] = 1e6
    """Maximum magnitude of a rollout's reward, and of the total reward of one call. More fails the
    agent."""
    max_metrics: Natural = 100
    """Numbers to keep per rollout in addition to the reward, and distinct ones in a metrics row."""
    max_infrastructure_failures: Share = 0.2
    """The run stops if a larger share of a step fails."""
    max_agent_failures: Share = 0.5
    """The run stops if the agent fails for one reason in more than this share of a step's rollouts,
    twice in a row. 1: never."""
    temperature: Annotated[float, Ge(0), Le(10)] | None = 1.0
    """Sampling in training rollouts, overriding the agent's request. None: as the agent asks."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = 1.0
    """Like temperature; 1: all tokens."""
    top_k: Natural | None = 0
    """Like temperature; 0: all tokens."""
    max_tokens: Count | None = None
    """Upper limit, not an override."""
    max_spans: Natural = 10_000
    """Spans an agent may post per rollout, including rewards of calls."""
    max_spans_mib: FiniteNonNegative = 64.0
    """Size of posted spans in the store."""

    def rules(self) -> Iterator[Rule]:
        is_above = self.max_retry_delay_s >= self.retry_delay_s
        yield "max_retry_delay_s", is_above, "expected at least rollout.retry_delay_s"

    def backoff_s(self, attempt: int) -> float:
        """Return the wait after a failed attempt, 1 or more, without the random part."""
        return backoff_s(attempt, self.retry_delay_s, self.max_retry_delay_s)


AGENT = "agent"  # component with the reward that the agent returned
PROMPT = "prompt"  # phase of the rollouts of a search for prompts
MEASURING = ("eval", PROMPT)  # phases that sample greedily, one attempt a task
EVALUATING = (*MEASURING, "sampled")  # phases that say how good the policy or a prompt is


@section
class ChatModel(ModelServer):
    """Model that a run asks over OpenAI's chat API."""

    served_by: str = INITIAL
    """initial: weights from the start of the run; the name of a policy of the run; or the URL of an
    OpenAI-compatible server, such as http://localhost:8000/v1."""

    @property
    def url(self) -> str | None:
        return self.served_by if self.served_by.startswith(("http://", "https://")) else None

    def rules(self) -> Iterator[Rule]:
        is_plain = self.url is None or is_plain_url(self.url)
        yield "served_by", is_plain, f"expected initial, a policy, or {PLAIN_URL}"
        yield from super().rules()


@section
class JudgeConfig(ChatModel):
    """Model that scores attempts over OpenAI's chat API.

    Without a rubric it compares all attempts of a group. With one it scores each attempt by itself.
    """

    rubric: PathOrName | None = None
    """YAML file of weighted criteria; None: compare the attempts."""
    instructions: str = ""
    """What makes an attempt good, in addition to the rubric."""
    reasons: bool = True
    """Ask for a sentence before each score."""
    repeats: Count = 1
    """Verdicts on the same attempts, whose mean counts."""
    max_verdicts: Count = 8
    """Verdicts on attempts with equal texts, at least `repeats`. Each such attempt asks for its own
    until there are so many, and gets the mean of all."""
    temperature: NonNegative = 0.0
    """Of the judge's samples."""
    max_tokens: Count = 1024
    """Of one verdict."""
    max_chars: Count = 8000
    """Of one attempt's text; the middle of a longer one is left out."""
    concurrency: Count = 8
    """Calls at once."""

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield (
            "temperature",
            self.temperature > 0 or self.rubric is None or self.repeats == 1,
            "expected above 0 with a rubric and repeats above 1, or all verdicts would be equal",
        )


@section
class PromptSearchConfig(ChatModel):
    """Search for better `prompts` between steps with GEPA (arXiv 2507.19457).

    A model reads rollouts and proposes prompts. The best replaces the present one if it also earns
    more on fresh tasks.
    """

    every: Natural = 0
    """Policy steps between two searches. The first comes before the first step. 0: none."""
    max_rollouts: Count = 60
    """Of the proposals of one search."""
    num_train: Count = 8
    """Training tasks of a search whose rollouts are read."""
    num_dev: Count = 12
    """Other training tasks, which choose the best proposal."""
    num_fresh: Annotated[int, Ge(3)] = 128
    """Further training tasks, which compare it with the present prompt: two rollouts each. All that
    are left if there are fewer."""
    minibatch: Count = 3
    """Rollouts that the model reads before a proposal."""
    temperature: NonNegative = 1.0
    """Of the proposals."""
    max_tokens: Count = 1024
    """Of one proposal."""
    max_chars: Count = 8000
    """Of one prompt; longer proposals are refused."""


@section
class RewardConfig(Section):
    """Component of the reward of a rollout, which is the weighted sum of its components.

    The component `agent` is what the agent returned. Any other has exactly one source.
    """

    weight: Finite = 1.0
    """0: held out, that is stored and shown but not trained on."""
    function: Choice | None = None
    """FILE:FUNCTION, (task, attempt) -> float; see docs/howto/rewards_from_judges.md. From Python
    also a function. Coroutine functions are awaited."""
    group: Choice | None = None
    """FILE:FUNCTION, (task, attempts) -> list of floats, for all scored attempts of a group."""
    judge: JudgeConfig | None = None
    """A model that scores the attempts."""
    in_evaluations: bool = True
    """False: it counts only in training, as partial credit for wrong answers should. Evaluations
    and a search for prompts show it, and leave it out of their reward."""

    def rules(self) -> Iterator[Rule]:
        for name in ("function", "group"):
            is_function = getattr(self, name) is None or is_custom(getattr(self, name))
            yield name, is_function, "expected FILE:FUNCTION, or a function from Python"

    def weight_in(self, phase: str) -> float:
        """Return the weight in the reward of a phase's rollouts."""
        return self.weight if self.in_evaluations or phase not in EVALUATING else 0.0

    @property
    def num_sources(self) -> int:
        return sum(value is not None for value in (self.function, self.group, self.judge))

    @property
    def needs_group(self) -> bool:
        """True if it scores the attempts of a group by comparing them."""
        return self.group is not None or (self.judge is not None and self.judge.rubric is None)


NAME = re.compile(r"[A-Za-z0-9_-]+")


def prompt_rules(
    search: PromptSearchConfig,
    prompts: Mapping[str, str],
    agent: AgentConfig,
    rollout: RolloutConfig,
    rewards: Mapping[str, RewardConfig],
) -> Iterator[Rule]:
    """Return what a search for prompts needs, and what each prompt has to be."""
    for name, text in prompts.items():
        expected = f"is {text!r}; expected a text, and a name of letters, digits, - and _"
        yield f"prompts.{name}", NAME.fullmatch(name) and text.strip(), expected, "invalid"
    # A search may make each prompt as long as `max_chars`.
    grown = {
        name: text.ljust(search.max_chars if search.every else 0) for name, text in prompts.items()
    }
    is_program = agent.command is not None or agent.python is not None
    yield (
        "prompts",
        not is_program or len("LIGHTNING_PROMPTS=") + len(json.dumps(grown)) < MAX_VARIABLE,
        f"need {MAX_VARIABLE // 1024} KiB or more as JSON, too much for an environment variable of "
        "a program; shorten them, or lower prompt_search.max_chars",
        "too_large",
    )
    if not search.every:
        return
    longest = max(prompts, key=lambda name: len(prompts[name]), default="")
    length = len(prompts.get(longest, ""))
    weighted = [reward for reward in rewards.values() if reward.weight_in(PROMPT)]
    needs = {
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
    }
    for key, (holds, fact) in needs.items():
        yield key, holds, f"is {fact}"


def reward_rules(rewards: Mapping[str, RewardConfig]) -> Iterator[Rule]:
    """Return what components need: exactly one source each, and a weight."""
    for name, reward in rewards.items():
        key, number = f"rewards.{name}", reward.num_sources
        expected = "has another name than letters, digits, - and _"
        yield key, NAME.fullmatch(name), expected, "invalid"
        expected = "none, because it is what the agent returned"
        if name != AGENT:
            expected = "exactly one of function, group and judge"
        has_source = number == (name != AGENT)
        yield key, has_source, f"has {number} sources; expected {expected}"
    yield (
        "rewards",
        not rewards or any(reward.weight for reward in rewards.values()),
        f"has only weights of 0 ({', '.join(rewards)}), so there is nothing to train on; give one "
        f"a weight, such as rewards.{AGENT}.weight=1",
    )
