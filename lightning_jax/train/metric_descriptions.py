"""Units and meanings of the metrics in a row of `metrics.jsonl`."""

import re
from typing import NamedTuple

PLACEHOLDERS = {"NAME": r".+", "REASON": r"[a-z0-9_]+"}


class Description(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    text: str


AREAS = {
    "eval": "An evaluation: the same unseen tasks each time, one greedy rollout of each.",
    "rollout": "The rollouts that a step learns from.",
    "reward": "Components of `rewards`, over the scored rollouts of a step.",
    "audit": "Signs of a gamed reward, in runs whose reward has components besides the agent's.",
    "prompts": "A search for better `prompts`, in the row of the step that it came before.",
    "train": "The update. Means are over trained tokens unless the text says otherwise.",
    "warmup": "Probes of a warm-up, which has the metrics of the update too, under `warmup/`.",
    "serve": "The server during the step.",
    "time": "Seconds of the step's parts. Some of them overlap.",
}

_TEXTS = {
    "eval/reward_mean": "reward: mean greedy reward; a rollout that the agent failed counts as 0",
    "eval/reward_stderr": "reward: standard error of that mean over tasks",
    "eval/full_reward_share": "share: tasks with a reward of 1 or more",
    "eval/change_mean": "reward: mean change per task since the first evaluation of the phase",
    "eval/change_stderr": "reward: standard error of the mean change",
    "eval/num_better": "tasks: number whose reward rose since then",
    "eval/num_worse": "tasks: number whose reward fell since then",
    "eval/change_p": "probability: of so uneven a split of rises and falls by chance (sign test)",
    "eval/change_since_step": "step: the evaluation that the change is measured from",
    "eval/sampled_reward_mean": "reward: mean of attempts sampled as in training (eval.attempts)",
    "eval/sampled_reward_stderr": "reward: standard error of that mean over tasks",
    "eval/sampled_solved_share": "share: tasks of which an attempt earned 1 or more (pass@k)",
    "eval/sampled_unequal_share": "share: tasks whose sampled attempts earned differently. Near 0 "
    "RL has nothing to learn",
    "eval/sampled_attempts": "attempts: number sampled per task",
    "eval/sampled_change_mean": "reward: mean change of a task's sampled reward in the phase",
    "eval/sampled_change_stderr": "reward: standard error of that change",
    "eval/sampled_num_better": "tasks: number whose mean sampled reward rose",
    "eval/sampled_num_worse": "tasks: number whose mean sampled reward fell",
    "eval/sampled_change_p": "probability: of so uneven a split by chance (sign test)",
    "eval/num_tasks": "tasks: number that were measured",
    "eval/num_agent_failures": "rollouts: number that the agent failed",
    "eval/num_infrastructure_failures": "rollouts: number without a result, left out of all means",
    "eval/agent_NAME_mean": "agent's: mean of a number that the agent returned",
    "eval/baseline_NAME": "reward: mean of answers that need no model, by `eval.baselines`",
    "eval/reward_NAME_mean": "reward: mean of a component of `rewards` over the scored rollouts",
    "eval/reward_NAME_std": "reward: standard deviation of that component",
    "rollout/reward_mean": "reward: mean over rollouts that have a reward",
    "rollout/reward_std": "reward: standard deviation over the same rollouts",
    "rollout/full_reward_share": "share: rollouts with a reward of 1 or more",
    "rollout/num_rollouts": "rollouts: all of the step, or those that called a role or a policy",
    "rollout/num_scored": "rollouts: number with a reward of their own",
    "rollout/num_agent_failures": "rollouts: number that the agent failed",
    "rollout/num_infrastructure_failures": "rollouts: number that failed in every attempt",
    "rollout/num_retries": "rollouts: number that needed more than one attempt",
    "rollout/agent_failure_REASON": "rollouts: number that the agent failed for this reason",
    "rollout/infrastructure_failure_REASON": "rollouts: number that failed for this reason",
    "rollout/num_calls": "calls: number of recorded calls to the policy",
    "rollout/calls_mean": "calls: mean per rollout",
    "rollout/call_reward_mean": "reward: mean own reward of a call, by agent or policy",
    "rollout/prompt_tokens": "tokens: all prompts together",
    "rollout/response_tokens": "tokens: all responses together",
    "rollout/response_tokens_mean": "tokens: mean length of a response",
    "rollout/response_tokens_max": "tokens: longest response",
    "rollout/entropy": "nats: mean surprise of a sampled token of any rollout, an estimate of the "
    "policy's entropy",
    "rollout/cut_short_share": "share: responses that a limit of tokens or time cut",
    "rollout/agent_NAME_mean": "agent's: mean of a number that the agent returned",
    "rollout/agent_dropped_metrics_mean": "numbers: mean per rollout beyond rollout.max_metrics",
    "rollout/agent_dropped_metrics_REASON_mean": "numbers: mean per rollout that had no value",
    "rollout/rule_NAME": "times: how often a reward rule applied",
    "rollout/rule_NAME_without_call": "times: how often no recorded call had caused it",
    "rollout/num_external_expired": "rollouts: number from outside that expired without a reward",
    "rollout/num_external_unfinished": "rollouts: number from outside that ended without a result",
    "rollout/num_external_groups_too_old": "groups: number dropped because every call was too old",
    "rollout/num_external_groups_incomplete": "groups: number of these that still lacked attempts",
    "rollout/external_too_old_share": "share: finished rollouts from outside that were dropped "
    "for their age. Raise rollout.tasks_per_step, or lower rollout.group_size if groups lack "
    "attempts",
    "rollout/num_sampling_rounds": "rounds: rounds of rollouts (dynamic sampling)",
    "rollout/num_groups_left_out": "groups: number left out because all returns are equal",
    "rollout/num_groups_replaced": "groups: number of further tasks drawn for them",
    "rollout/tasks_unseen_share": "share: tasks without a rollout so far (data.sampler=difficulty)",
    "rollout/tasks_unsolved_share": "share: tasks for which no attempt has earned anything so far",
    "rollout/tasks_solved_share": "share: tasks whose last attempts all had the full reward",
    "rollout/tasks_left_out_share": "share: tasks left out because they are always solved",
    "rollout/dropped_no_reward": "rollouts: number without a reward, not trained on",
    "rollout/dropped_bad_reward": "rollouts: number with a reward above rollout.max_abs_reward",
    "rollout/dropped_no_calls": "rollouts: number that made no call to the policy",
    "rollout/dropped_frozen_calls": "calls: number made by roles or policies that do not train",
    "rollout/dropped_served_elsewhere": "calls: number that a role's own server answered",
    "rollout/dropped_empty_response": "calls: number with an empty prompt or response",
    "rollout/dropped_no_logprobs": "calls: number without recorded log-probabilities",
    "rollout/dropped_reward_without_call": "rewards: number for a call that is not in the record",
    "rollout/dropped_REASON": "calls: number that ended with this error",
    "reward/NAME_mean": "reward: mean of a component, before its weight",
    "reward/NAME_std": "reward: standard deviation of that component",
    "reward/NAME_failed": "rollouts: number for which the component failed",
    "reward/NAME_calls": "calls: number sent to the component's judge",
    "reward/NAME_failed_calls": "calls: number without a usable answer",
    "reward/NAME_cached_calls": "calls: number not made, as stored verdicts sufficed",
    "reward/NAME_tokens": "tokens: prompts and answers of the judge, as its server counts them",
    "reward/NAME_s": "s: time of the judge's calls, which overlap, with waits before retries",
    "reward/NAME_disagreement": "reward: mean standard deviation of the verdicts on a text",
    "audit/correlation/NAME": "rank correlation: of two components within a group, mean of groups",
    "audit/distinct_3": "share: different 3-grams of tokens among those of all last responses",
    "audit/repetition_4": "share: 4-grams of tokens that repeat, in the mean last response",
    "audit/near_copies": "share: last responses with a near-copy in their group",
    "prompts/score_before": "reward: mean on the search's dev tasks with the earlier prompts",
    "prompts/score_after": "reward: the same with the prompts that the search chose",
    "prompts/num_fresh_tasks": "tasks: number that compared the best proposal with those prompts",
    "prompts/fresh_before": "reward: mean on these tasks with the earlier prompts",
    "prompts/fresh_after": "reward: mean on these tasks with the best proposal",
    "prompts/p_value": "probability: that equal prompts win on so many of these tasks",
    "prompts/changed": "0 or 1: 1 if the search chose other prompts",
    "prompts/failed": "0 or 1: 1 if the search ended early, because a model or rollouts failed",
    "prompts/num_rollouts": "rollouts: number that the search ran; nothing trains on them",
    "prompts/num_candidates": "prompts: number compared on the dev tasks, the first included",
    "prompts/num_refused": "rollout batches: number refused, for an empty or too long prompt",
    "prompts/calls": "calls: number sent to the model that proposes",
    "prompts/failed_calls": "calls: number without a usable answer",
    "prompts/tokens": "tokens: prompts and answers of that model, as its server counts them",
    "prompts/search_s": "s: time of the search",
    "train/loss": "loss: sum over the step's weighted tokens",
    "train/nll": "nats: mean negative log-likelihood of a demonstrated token",
    "train/entropy": "nats: mean entropy of the policy at a token with a gradient. Groups without "
    "one are not in it; see `rollout/entropy`",
    "train/mismatch_kl": "nats: KL between sampler and trainer; above 1e-3 in float32 is a bug",
    "train/kl_to_reference": "nats: estimated KL to the reference policy",
    "train/kl_to_teacher": "nats: reverse KL to the teacher, estimated from the sampled tokens",
    "train/distill_kl": "nats: KL to the teacher's likeliest tokens, the loss of distill.kl",
    "train/teacher_named_mass": (
        "probability: sum over the teacher's likeliest tokens; if it is low, raise distill.top_k"
    ),
    "train/teacher_coef": "weight: weight of the teacher in this step",
    "train/teacher_share": "share: trained tokens that the teacher scored",
    "train/without_teacher": "calls: number that the teacher did not score",
    "train/other_temperature": "calls: number of these whose temperature its server cannot score",
    "train/without_hint": "calls: number without a hint, or a place for it, and so not scored",
    "train/hints_in_prompts": "calls: number whose prompt got the hint from a tool or the policy",
    "train/clip_fraction": "share: tokens whose gradient a bound of the ratio cut",
    "train/ratio_mean": "ratio: mean ratio of the current to the proximal policy",
    "train/ratio_max": "ratio: largest such ratio",
    "train/correction_ratio_mean": "ratio: mean ratio of the old to the behavior policy",
    "train/correction_ratio_max": "ratio: largest such ratio",
    "train/correction_truncated_share": "share: tokens whose correction was cut. By length=short, "
    "medium and long (above 256 and 1024 trained tokens of a response), too: if it grows with the "
    "length, set algorithm.correction_level=token or lower rollout.ahead",
    "train/correction_masked_share": "share: tokens that the correction left out. By length, too",
    "train/correction_changed_share": "share: tokens that a custom correction changed. By length, "
    "too",
    "train/grad_norm": "norm: gradient of the policy before clipping",
    "train/grad_signal": "norm²: estimate of the squared true gradient, in this step",
    "train/grad_noise": "norm²: estimate of the noise of one group's gradient, in this step",
    "train/grad_square": "norm²: squared gradient of the update that both are estimated from",
    "train/noise_scale": "groups: number of which half of the squared gradient would be signal, "
    "over the last 20 steps. Far above rollout.tasks_per_step, sample more tasks",
    "train/signal_share": "share: part of the squared gradient that is signal, over these steps",
    "train/num_updates": "updates: optimizer updates of the step",
    "train/skipped_updates": "updates: number whose gradient was not finite",
    "train/num_batches": "microbatches: number of the step",
    "train/num_tokens": "tokens: trained tokens. With a correction by length=short, medium, long",
    "train/num_sequences": "calls: number in the batch",
    "train/num_rows": "rows: rows of the batch",
    "train/num_distinct_targets": "targets: pairs of a node and a next token, counted once",
    "train/tokens_naive": "tokens: prompts and responses, if each call were computed alone",
    "train/tokens_forest": "tokens: the same with shared prefixes computed once",
    "train/tokens_forced": "tokens: number to which a grammar left no choice or, with a "
    "probability above 0.999, hardly any; not trained",
    "train/masked_share": "share: trained tokens that were sampled under a grammar that the loss "
    "replays, so that their gradients are those of the masked policy",
    "train/calls_without_mask": "calls: number whose grammar the loss could not replay; their "
    "tokens are trained as if there were no mask",
    "train/adjusted_share": "share: trained tokens whose distribution lost more than a tenth of "
    "its mass to a mask, a filter or a low temperature. Their gradients are biased: sample with "
    "top_p 1 and top_k 0, and send no biases and no penalties",
    "train/tokens_per_s": "tokens/s: `train/tokens_naive` by the update's time",
    "train/forest_tokens_per_s": "tokens/s: `train/tokens_forest` by the update's time",
    "train/padding_share": "share: unused places of the batch's rows",
    "train/targets_share": "share: used places for targets",
    "train/dropped_too_long": "calls: number longer than batch.row_len",
    "train/dropped_too_many_targets": "calls: number with more targets than batch.max_targets",
    "train/dropped_empty_response": "calls: number with an empty response",
    "train/dropped_all_forced": "calls: number in which a grammar forced every token",
    "train/dropped_zero_advantage": "calls: number with advantage 0, which have no gradient",
    "train/dropped_stale": "calls: number older than algorithm.max_staleness",
    "train/dropped_cut_short": "calls: number that a limit cut, left out by overlong_filter",
    "train/dropped_pairs": "pairs: number with a call that fits no row (DPO)",
    "train/dropped_tokens": "tokens: sampled tokens of all dropped calls",
    "train/num_groups": "groups: number of tasks with their rollouts",
    "train/failures_gain_share": "share: failed rollouts with a positive advantage. Look at their "
    "calls, or set rollout.agent_failure_reward=null",
    "train/equal_groups_share": "share: groups whose returns are all equal, which teach nothing",
    "train/only_call_rewards_share": "share: groups that differ by rewards of single calls alone",
    "train/advantage_abs_mean": "advantage: mean magnitude over calls",
    "train/overlong_penalty_mean": "reward: mean penalty of a call for its length",
    "train/staleness_mean": "steps: mean age of the weights that sampled a trained token",
    "train/staleness_max": "steps: age of the oldest weights that sampled a trained token",
    "train/staleness_share": "share: trained tokens whose weights have this age, by age=STEPS",
    "train/num_pairs": "pairs: number of rollouts compared (DPO)",
    "train/preference_accuracy": "share: pairs with a margin above 0 before the update (DPO)",
    "train/preference_margin": "nats: mean margin before the update (DPO)",
    "train/value_loss": "reward²: half the squared error of the values",
    "train/value_mean": "reward: mean value of the step's states",
    "train/value_explained_variance": "share: variance of the returns that the values explain",
    "train/value_grad_norm": "norm: gradient of the value head",
    "train/value_clip_fraction": "share: values whose gradient algorithm.value_clip cut",
    "train/calls_without_value": "calls: number too long for a row, without a value",
    "train/sink_rows_lost": "rows: number that a metric sink has not taken so far, by sink=NAME",
    "warmup/probe_unequal_share": "share: probed tasks whose attempts earned differently",
    "warmup/probe_solved_share": "share: probed tasks of which an attempt earned 1 or more",
    "warmup/probe_score": "share²: product of both; warmup.stop ends the warm-up near its peak",
    "warmup/best_step": "step: weights that the policy phase starts from, where a probe ended it",
    "train/num_tasks": "tasks: tasks of a warm-up step",
    "train/num_conversations": "conversations: demonstrations of a warm-up step",
    "serve/requests": "requests: number that began",
    "serve/steps": "steps: decode steps",
    "serve/tokens_generated": "tokens: sampled tokens",
    "serve/prefix_hit_share": "share: prompt tokens that were found in the prefix cache",
    "serve/prefix_breaks": "calls: number that replay a response but not its token ids",
    "serve/malformed_tool_calls": "calls: tool calls that could not be read",
    "serve/joined_calls": "calls: retries that joined a running or answered call",
    "serve/late_responses": "responses: number that a time limit ended, with their tokens so far. "
    "Raise rollout.call_timeout_s",
    "serve/compiles": "programs: number compiled since the start",
    "serve/samplers": "samplers: number that serve, of a cluster",
    "serve/samplers_lost": "samplers: number that died or fell silent since the start",
    "serve/publish_gb_per_s": "GB/s: rate at which new weights reached the engines",
    "time/step_s": "s: from the row before to this one",
    "time/rollout_s": "s: rollouts of the step",
    "time/trainer_wait_s": "s: wait of the trainer for the step's rollouts",
    "time/sampler_wait_s": "s: from the row before to this one in which no rollout ran",
    "time/eval_s": "s: evaluation",
    "time/probe_s": "s: probe of the warm-up",
    "time/prepare_s": "s: credit, advantages and token weights",
    "time/masks_s": "s: replay of the grammars of the step's calls, for the loss",
    "time/values_s": "s: forward pass that measures the values",
    "time/teacher_s": "s: forward pass of the teacher",
    "time/batching_s": "s: packing of the batch",
    "time/train_s": "s: update",
    "time/publish_s": "s: new weights to the engines",
    "time/checkpoint_s": "s: writing the checkpoint before this one, beside the rollouts",
    "time/checkpoint_wait_s": "s: time that the update waited for it",
}
# NAME and REASON stand for any name and reason.
METRICS = {name: Description(*text.split(": ", 1)) for name, text in _TEXTS.items()}


def describe(name: str) -> Description | None:
    """Return the description of a metric in a row, or None if there is none.

    A metric of one agent, policy or task field, such as `eval/reward_mean/source=svamp`, has the
    description of the whole. A warm-up's `warmup/` metrics have those of `train/`.
    """
    area, _, rest = name.partition("/")
    area = "train" if area == "warmup" else area
    for known in (name, f"{area}/{rest.split('/', 1)[0]}", f"{area}/{rest}"):
        if known in METRICS:
            return METRICS[known]
        found = next((METRICS[key] for key, made in _PATTERNS if made.fullmatch(known)), None)
        if found is not None:
            return found
    return None


_PATTERNS = [
    (key, re.compile(re.sub("|".join(PLACEHOLDERS), lambda found: PLACEHOLDERS[found[0]], key)))
    for key in sorted(METRICS, key=len, reverse=True)
    if any(word in key for word in PLACEHOLDERS)
]
