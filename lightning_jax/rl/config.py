"""Settings of the learning algorithm, its batches and its optimizer."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from lightning_jax.models.shape import chunk_for, nearest_divisor
from lightning_jax.settings.loading import ModelServer
from lightning_jax.settings.schema import (
    DERIVED,
    Count,
    Finite,
    FinitePositive,
    FunctionRef,
    Natural,
    NonNegative,
    PathKind,
    PathOrName,
    Positive,
    Rule,
    Section,
    Share,
    Url,
    expect,
    section,
    shown_as,
)


def _named(choice: Any) -> Any:
    """Return MODULE:FUNCTION for a function."""
    if not callable(choice):
        return choice
    return f"{choice.__module__}:{getattr(choice, '__qualname__', type(choice).__qualname__)}"


if TYPE_CHECKING:
    Choice = str | Callable[..., Any]
else:  # in YAML a name or FILE:FUNCTION, from Python also a function
    Choice = Annotated[Any, PathKind.FUNCTION, shown_as(_named)]

GROUP_BASELINES = ("group_mean", "leave_one_out")  # compare the rollouts of a group
NAMES = {  # of choices, besides functions
    "credit": ("identical", "per_step", "turn_groups", "learned", "learned_token"),
    "baseline": (*GROUP_BASELINES, "batch_mean", "none"),
    "loss": ("clip", "gspo", "cispo", "reinforce", "raft", "dpo"),
    "correction": ("none", "truncate", "mask"),
}
DPO = {  # the only values with this loss
    "credit": "identical",
    "correction": "none",
    "overlong_filter": False,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "policy_updates": "independent",
    "num_minibatches": 1,
}


def is_custom(choice: Choice) -> bool:
    """Return whether a setting is a function, or names one as FILE:FUNCTION."""
    return callable(choice) or (isinstance(choice, str) and ":" in choice)


@section
class AlgorithmConfig(Section):
    """Settings that turn rewards into a loss. docs/algorithms.md lists them for each algorithm."""

    credit: Choice = "identical"
    """Returns of calls: identical, per_step, turn_groups, learned or learned_token. Each Choice is
    also FILE:FUNCTION, or a function from Python; see docs/algorithms.md."""
    discount: Annotated[float, Gt(0), Le(1)] = 1.0
    """Per call, or per token with learned_token; unused by identical."""
    gae_lambda: Share = 1.0
    """For learned and learned_token; 1: unbiased for any values."""
    overlong_penalty: NonNegative = 0.0
    """Maximum penalty of a long response, in reward units. 0: off."""
    overlong_max_tokens: Count | None = None
    """Response length, in tokens, that gets the full penalty. None: the token limit of the call."""
    overlong_buffer: Natural | None = None
    """Tokens before that length over which the penalty rises from 0. None: a fifth of it."""
    overlong_filter: bool = False
    """True: calls that the token limit cut count in their group's returns, but do not train."""
    max_sampling_rounds: Count = 1
    """Maximum rounds of rollouts in one step. Each extra round replaces groups with equal returns
    by other tasks; such groups are never trained on. 1: replace no group."""
    baseline: Choice = "group_mean"
    """Subtracted for the advantages: group_mean, leave_one_out, batch_mean or none."""
    normalize: Literal["group_std", "batch_std", "none"] = "group_std"
    """Divisor of the advantages."""
    loss: Choice = "clip"
    """clip (PPO, per token), gspo (per call), cispo, reinforce, raft (best of group) or dpo."""
    raft_min_return: Finite = 0.0
    """For raft: only rollouts with a return above this are learned, in reward units."""
    dpo_beta: Positive = 0.1
    """For dpo: strength of the penalty for leaving the reference."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Distance of the lower bound from ratio 1. 1: no lower bound."""
    clip_high: Positive = 0.2
    """Distance of the upper bound from ratio 1."""
    clip_dual: Annotated[float, expect(lambda x: x == 0 or x > 1, "above 1, or 0 (off)")] = 3.0
    """For clip and gspo: ratio, above 1, beyond which a negative advantage is ignored. 0: off."""
    aggregation: Literal["rollout", "token", "call", "constant"] = "rollout"
    """Units with equal weight."""
    token_divisor: Positive = 1024.0
    """For constant: divisor of a rollout's sum, in tokens."""
    proximal: Literal["behavior", "old"] = "behavior"
    """Off-policy correction: policy in the ratio's denominator."""
    correction: Choice = "none"
    """none, truncate or mask, by the ratio of old to behavior policy."""
    correction_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Scope of one ratio."""
    correction_low: NonNegative | None = None
    """For mask: smallest ratio that is kept. None: 0.5, or 0.99 with sequence_mean, because a mean
    over tokens hardly leaves 1."""
    correction_high: FinitePositive | None = None
    """For mask: largest ratio that is kept; for truncate: the cap. None: 2, or 1.01 likewise."""
    max_staleness: Natural = 4
    """In trainer steps; older transitions are dropped and counted."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference; 0: only dpo keeps a reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1: x, k2: x^2 / 2, k3: exp(-x) - 1 + x, with x = log p - log p_ref of a sampled token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: subtract the rest of the KL from advantages."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus per token, in nats."""
    value_learning_rate: Positive = 1e-3
    """Of the value head's own Adam, without a schedule."""
    value_clip: NonNegative = 0.0
    """Maximum move of a value in one step, in reward units; 0: off."""
    value_coef: NonNegative = 0.0
    """Weight of the value loss for the policy; 0: only the head's."""
    policy_updates: Literal["independent", "joint"] = "independent"
    """Several policies: independent updates (each from its own calls), or one joint update."""
    value_heads: Literal["per_policy", "shared"] = "per_policy"
    """shared: with joint updates only."""
    num_epochs: Count = 1
    """Passes over the data of one step."""
    num_minibatches: Count = 1
    """Optimizer updates per pass."""
    skip_zero_advantage: bool = True
    """Leave out rows without a gradient; the update is the same."""
    max_nonfinite_steps: Count = 5
    """Stop after this many steps in a row without a finite gradient."""

    def rules(self) -> Iterator[Rule]:
        for name, names in NAMES.items():
            value, expected = getattr(self, name), f"expected {', '.join(names)} or FILE:FUNCTION"
            yield name, value in names or is_custom(value), expected, "unknown"
        if self.loss == "dpo":  # would ignore other values
            for name, only in DPO.items():
                expected = f"expected {only}, because loss is dpo"
                yield name, getattr(self, name) == only, expected
        if self.loss == "gspo" and self.proximal == "behavior":
            # Smaller bounds are within the gap between sampler and trainer in bfloat16.
            for name in ("clip_low", "clip_high"):
                expected = "expected at least 0.01 where loss is gspo; or set proximal to old"
                yield name, getattr(self, name) >= 0.01, expected
        # The best rollout is learned whole, so credit must not differ between calls.
        is_whole = self.loss != "raft" or self.credit == "identical" or is_custom(self.credit)
        yield "credit", is_whole, "expected identical, because loss is raft"
        limit, (low, high) = self.overlong_max_tokens, self.correction_bounds
        fits = (self.overlong_buffer or 0) <= (limit or math.inf)
        yield "overlong_buffer", fits, f"expected at most overlong_max_tokens={limit}"
        is_old = self.proximal == "old" or self.loss in ("reinforce", "raft")
        yield (
            "correction",
            self.correction != "truncate" or is_old,
            "expected none or mask, because the ratio of this loss is to the behavior policy "
            "already; or set proximal to old",
        )
        yield "correction_high", high > low, f"expected above correction_low={low:g}"
        yield (
            "value_heads",
            self.value_heads != "shared" or self.policy_updates == "joint",
            "expected per_policy, because policy_updates=independent shares no parameters",
        )
        has_use = self.value_coef == 0 or self.has_critic
        yield "value_coef", has_use, "expected 0 unless credit is learned or learned_token"

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio that a correction keeps."""
        is_mean = self.correction_level == "sequence_mean"
        low, high = (0.99, 1.01) if is_mean else (0.5, 2.0)
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def has_reference(self) -> bool:
        """True if a frozen copy of the policy is kept from the start of the policy phase."""
        return self.kl_coef > 0 or self.loss == "dpo"

    @property
    def has_critic(self) -> bool:
        """True if a value head is trained."""
        return self.credit in ("learned", "learned_token")

    @property
    def has_only_policy_gradient(self) -> bool:
        """True if a token without an advantage has no gradient: no KL, entropy or value term.

        A custom loss may have other terms.
        """
        has_other_terms = self.kl_coef > 0 or self.entropy_coef > 0 or is_custom(self.loss)
        return not (has_other_terms or self.has_critic)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss reads the trainer's log-probabilities from before the first update."""
        return self.proximal == "old" or (self.kl_coef > 0 and self.kl_in == "reward")


TOP_K = 64  # likeliest tokens of a teacher in this process
SERVER_TOP_K = 20  # most that vLLM gives by default, and `lightning-jax serve`


@section
class DistillConfig(ModelServer):
    """Distillation of a teacher into the policy, at the tokens that the policy sampled.

    The loss is that of the rewards, with advantages times `reward_coef`, plus `coef` times the KL
    to the teacher in nats, with the weights of the tokens.
    """

    teacher: PathOrName | None = None
    """Directory, file or hub id of a model with the policy's vocabulary, or initial: the model that
    the run starts from. None: no teacher or, with a hint, the policy at the step's weights."""
    teacher_url: Url | None = None
    """OpenAI-compatible server that scores tokens instead (completions with echo and logprobs),
    such as http://localhost:8000/v1. Its model has the policy's vocabulary."""
    hint: FunctionRef | None = None
    """FILE:FUNCTION, task -> text that only the teacher reads; see
    docs/howto/learn_from_hints.md."""
    kl: Literal["forward", "reverse", "sampled"] = "forward"
    """forward: KL(teacher, policy) over the teacher's likeliest tokens, which teaches what the
    policy never samples; reverse: KL(policy, teacher) over the same tokens; sampled: the reverse KL
    estimated from the sampled token alone, in the advantages."""
    top_k: Count | None = None
    """Tokens that the teacher names at each sampled one; the others count as one. Unused by
    sampled. None: 64, or 20 with a URL, which is what servers allow."""
    coef: NonNegative = 1.0
    """Weight of the teacher in the first policy step. With forward, 1 is as strong as an advantage
    of 1 on tokens that the teacher would sample."""
    final_coef: NonNegative | None = None
    """The same after anneal_steps policy steps, in a straight line from coef. None: coef."""
    anneal_steps: Natural = 0
    """Policy steps from coef to final_coef."""
    reward_coef: NonNegative = 1.0
    """Weight of the rewards' advantages; 0: the teacher alone."""

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        is_only = self.teacher_url is None or self.teacher is None
        yield "teacher", is_only, "expected none with distill.teacher_url"
        anneals = self.final_coef is not None
        steps = "at least 1 with" if anneals else "0 without"
        fits = anneals == (self.anneal_steps > 0)
        yield "anneal_steps", fits, f"expected {steps} distill.final_coef"

    @property
    def url(self) -> str | None:
        return self.teacher_url

    @property
    def has_teacher(self) -> bool:
        """True if a teacher scores the sampled tokens: another model, or the policy with a hint."""
        return any(name is not None for name in (self.teacher, self.teacher_url, self.hint))

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens that the teacher names at each sampled one."""
        if self.kl == "sampled":
            return 0
        return self.top_k or (TOP_K if self.teacher_url is None else SERVER_TOP_K)

    def coef_at(self, policy_step: int) -> float:
        """Return the weight of the teacher in a policy step, 0 without a teacher."""
        if not self.has_teacher:
            return 0.0
        if self.final_coef is None:
            return self.coef
        share = min(policy_step / self.anneal_steps, 1.0)
        return self.coef + share * (self.final_coef - self.coef)


# Sizes that `BatchConfig.with_sizes` derives where they are None.
if TYPE_CHECKING:
    RowLength = int
    Size = int
else:
    RowLength, Size = Annotated[int, Ge(16)] | None, Count | None
ROW_LEN, MAX_TARGETS, HEAD_CHUNK = 512, 1024, 256  # least row and targets, and usual chunk


@section
class BatchConfig(Section):
    """Shape of a batch. A microbatch has `rows` rows."""

    rows: Count = 1
    """Rows of a microbatch; gradients are summed over the microbatches."""
    row_len: RowLength = DERIVED
    """Nodes per row, at least serve.max_len. None: serve.max_len, or 512 if that is more."""
    max_targets: Size = DERIVED
    """Sampled tokens per row; equal tokens of siblings count separately. None: row_len, or 1024 if
    that is more, rounded up to a multiple of head_chunk."""
    head_chunk: Count | None = None
    """Targets whose logits are in memory at once; divides max_targets. None: the divisor that is
    nearest to 256. Of a vocabulary of V > 49,152 tokens it is nearest to 256 * 49,152 / V, so that
    the logits take as much memory."""

    def rules(self) -> Iterator[Rule]:
        targets, chunk = self.max_targets, self.head_chunk
        divides = targets is None or chunk is None or targets % chunk == 0
        yield "head_chunk", divides, f"expected a divisor of max_targets={self.max_targets}"

    def with_sizes(self, max_len: int) -> "BatchConfig":
        """Return the settings with all sizes, for sequences of up to `max_len` tokens."""
        row_len = self.row_len or max(ROW_LEN, max_len)
        chunk = self.head_chunk or HEAD_CHUNK
        targets = self.max_targets or math.ceil(max(MAX_TARGETS, row_len) / chunk) * chunk
        return replace(self, row_len=row_len, max_targets=targets)

    @property
    def largest_chunk(self) -> int:
        """Return `head_chunk`, by default that of a vocabulary of up to 49,152 tokens."""
        return self.head_chunk or nearest_divisor(self.max_targets, float(HEAD_CHUNK))

    def chunk_of(self, vocab_size: int) -> int:
        """Return the number of targets whose logits are in memory at once.

        It divides `largest_chunk`, so that logits of a large vocabulary take as much memory.
        """
        return self.head_chunk or chunk_for(vocab_size, self.largest_chunk)


@section
class OptimizerConfig(Section):
    """Settings of AdamW and its learning rate."""

    learning_rate: Positive = 1e-6
    """Peak, after the rise and before the decay."""
    warmup_steps: Natural = 0
    """Updates over which the rate rises linearly from 0."""
    decay_steps: Count | None = None
    """Updates of cosine decay to a tenth of the rate, after the warm-up. None: constant."""
    weight_decay: NonNegative = 0.0
    """Of matrices, times the learning rate."""
    b1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the first moments, per update."""
    b2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the second moments, per update."""
    eps: Positive = 1e-8
    """Added to the root of the second moments."""
    max_grad_norm: Positive = 1.0
    """A gradient with a larger norm is scaled down to it."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of AdamW's first moments. bfloat16 halves their memory."""
