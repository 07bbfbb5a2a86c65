"""Signs of a run that does not learn, and what to do: `lightning-jax help troubleshooting`.

docs/reference.py writes the page of the docs from these rows.
"""

import re
import textwrap
from typing import NamedTuple

TITLE = "When it does not learn"
INTRODUCTION = """\
    lightning-jax view runs/first                       # the table at its end groups failures
    lightning-jax view runs/first train-00003-000-00-1  # one rollout, with every prompt and reward
    python -m json.tool --json-lines runs/first/metrics.jsonl

Look for the first row that fits."""
COLUMNS = ("what you see", "what it means", "what to do")
WIDTH = 80
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


class Row(NamedTuple):
    """One sign. Its texts are Markdown, with links relative to docs/get_started."""

    seen: str
    meaning: str
    cure: str


SECTIONS = {
    "The run does not start": (
        Row(
            "a directory has no tokenizer.json",
            "the model has only a slow tokenizer, or was copied without it",
            "save the fast one with transformers ([how](../models.md#a-missing-tokenizerjson))",
        ),
        Row(
            "`model_type` is not supported",
            "the decoder does not compute this family",
            "take a model of [another family](../models.md#families)",
        ),
        Row(
            "the plan does not fit a device",
            "weights, moments, slots and rows need more memory",
            "`model.lora.rank=16`, `model.remat=true`, fewer `serve.slots` ([which model "
            "fits](../which_model_fits.md))",
        ),
        Row(
            "another process trains in the run directory",
            "one process at a time works there",
            "wait for it or stop it, then [resume](../howto/resume_a_run.md); or set `run_dir`",
        ),
    ),
    "The run ends at once": (
        Row(
            "all rollouts failed before the policy answered a call",
            "the agent or its tasks are broken",
            "fix what the message names and run the same command; it resumes",
        ),
        Row(
            "most rollouts failed by the agent, for one reason twice in a row",
            "the agent fails for the reason named, with file and line",
            "fix it, or raise `rollout.max_tokens` if replies were cut; "
            "`rollout.max_agent_failures=1` if it is meant to fail",
        ),
        Row(
            "none of a step's rollouts called the policy",
            "the agent answered from a cache of its framework, or calls another URL",
            "turn the cache off; use `llm.base_url` and `llm.api_key`",
        ),
        Row(
            "rollouts failed for infrastructure reasons",
            "a service that the agent needs is down, or calls time out",
            "`lightning-jax view RUN` names the reason ([list](../reference/failures.md))",
        ),
    ),
    "A warning": (
        Row(
            "nothing was trained, and `lightning-jax train` exits with 1",
            "no step with rollouts changed the weights; mostly, all attempts at each task earned "
            "the same",
            "see below: the reward does not rise",
        ),
        Row(
            "scored rollouts made no call to the policy",
            "the agent's framework answered from a cache (DSPy has one by default), or it "
            "calls another URL",
            "turn the cache off; use `llm.base_url` and `llm.api_key`",
        ),
        Row(
            "sequences are not trained on (`train/dropped_too_long` above 0)",
            "a conversation is longer than a row of the batch",
            "raise `batch.row_len` and `batch.max_targets` to `serve.max_len`",
        ),
        Row(
            "replies were cut (`rollout/cut_short_share` high)",
            "replies end at the token limit",
            "raise `rollout.max_tokens` and the agent's own limit, or ask for shorter answers",
        ),
        Row(
            "a role, policy or reward rule matched nothing",
            "its pattern fits no call; the warning has the names that calls had",
            "correct the pattern, or the name that the agent uses",
        ),
        Row(
            "replies were cut at a time limit (`serve/late_responses` high)",
            "they decode for longer than `rollout.call_timeout_s`, or until the rollout's deadline",
            "raise `rollout.call_timeout_s` and `rollout.timeout_s`, or ask for shorter answers",
        ),
        Row(
            "rollouts met their deadline while calls waited (`deadline_in_queue`)",
            "calls waited for a slot or a compilation, which is not the policy's fault",
            "lower `rollout.concurrency`; raise `rollout.timeout_s` or `serve.slots`",
        ),
        Row(
            "`train/mismatch_kl` is too large",
            "the trained policy is not the one that sampled",
            "a bug of ours: please report it with `lightning-jax verify RUN`",
        ),
    ),
    "The reward does not rise": (
        Row(
            "`rollout/reward_mean` 0 and `train/equal_groups_share` near 1",
            "no attempt earns anything, so none is better than another",
            "reward a part of the way; put an example into the prompt; else [warm up on "
            "demonstrations](../howto/warm_up_on_demonstrations.md) or [learn from "
            "hints](../howto/learn_from_hints.md)",
        ),
        Row(
            "`train/equal_groups_share` above 0.5 and `rollout/entropy` below 0.05 nats",
            "the policy is sure; attempts at a task hardly differ",
            "more attempts (`rollout.group_size`), or replace equal groups "
            "(`algorithm.max_sampling_rounds=3`), or a shorter or longer warm-up",
        ),
        Row(
            "`train/only_call_rewards_share` high; right answers become fewer",
            "small rewards of single calls weigh as much as being right",
            "`algorithm.normalize=batch_std`",
        ),
        Row(
            "all rollouts make the same number of calls, whatever the task",
            "the policy has not learned when to stop; rewards move the number for all tasks alike",
            "more demonstrations of both kinds, or a tool that does it in one call",
        ),
        Row(
            "the evaluation goes up and down",
            "a few dozen tasks say little",
            'read "better, worse" in the final table; raise `eval.num_tasks`',
        ),
        Row(
            "the reward falls after a few steps",
            "steps are too large, or too few tasks speak for all",
            "halve `optimizer.learning_rate`; raise `rollout.tasks_per_step`",
        ),
    ),
}


def as_text() -> str:
    """Return the page for a terminal: under each sign its meaning and what to do."""
    parts = [TITLE, INTRODUCTION]
    for title, rows in SECTIONS.items():
        parts += [title.upper(), *map(_entry, rows)]
    return "\n\n".join(parts)


def _entry(row: Row) -> str:
    """Return a row as three paragraphs, without the marks of Markdown."""
    seen, meaning, cure = (LINK.sub(r"\1", text).replace("`", "") for text in row)
    lines = [textwrap.fill(seen, WIDTH, subsequent_indent="  ")]
    for sign, text in (("    ", meaning), ("  > ", cure)):
        lines.append(textwrap.fill(text, WIDTH, initial_indent=sign, subsequent_indent="    "))
    return "\n".join(lines)
