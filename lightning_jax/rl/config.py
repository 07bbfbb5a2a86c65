"""Settings of the learning algorithm, its batches and its optimizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from lightning_jax.schema import (
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
    Section,
    Share,
    is_plain_url,
    require,
)

# In YAML a name or FILE:FUNCTION, from Python also a function, which OmegaConf knows no type for.
if TYPE_CHECKING:
    Choice = str | Callable[..., Any]
else:
    Choice = Annotated[Any, PathKind.FUNCTION]


def is_custom(choice: Choice) -> bool:
    """Return whether a setting is a function, or names one as FILE:FUNCTION."""
    return callable(choice) or (isinstance(choice, str) and ":" in choice)


@dataclass(frozen=True)
class AlgorithmConfig(Section):
    """Settings that turn rewards into a loss. docs/algorithms.md lists them for each algorithm."""

    # Rewards and the choice of rollouts.
    # Each Choice is also FILE:FUNCTION, or a function from Python; see docs/algorithms.md.
    credit: Choice = "identical"  # identical, per_step, turn_groups, learned or learned_token
    # Per call, or per token with learned_token; unused by identical.
    discount: Annotated[float, Gt(0), Le(1)] = 1.0
    gae_lambda: Share = 1.0  # for learned and learned_token; 1: unbiased for any values
    # Maximum penalty of a long response, in reward units. 0: off.
    overlong_penalty: NonNegative = 0.0
    # Response length, in tokens, that gets the full penalty. None: the token limit of the call.
    overlong_max_tokens: Count | None = None
    # Tokens before that length over which the penalty rises from 0. None: a fifth of the length.
    overlong_buffer: Natural | None = None
    # True: calls that the token limit cut are not trained on. They count in their group's returns.
    overlong_filter: bool = False
    # Maximum rounds of rollouts in one step. Each extra round replaces groups with equal returns
    # by other tasks; such groups are never trained on. 1: replace no group.
    max_sampling_rounds: Count = 1
    # Advantages.
    baseline: Choice = "group_mean"  # group_mean, leave_one_out, batch_mean or none
    normalize: Literal["group_std", "batch_std", "none"] = "group_std"  # divisor of the advantages
    # Loss of a token, and its weight.
    # clip (PPO, per token), gspo (per call), cispo, reinforce, raft (best of group) or dpo.
    loss: Choice = "clip"
    # For raft: only rollouts with a return above this are learned, in reward units.
    raft_min_return: Finite = 0.0
    dpo_beta: Positive = 0.1  # for dpo: strength of the penalty for leaving the reference
    # Distance of the lower bound from ratio 1. 1: no lower bound.
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    clip_high: Positive = 0.2  # distance of the upper bound from ratio 1
    # For clip and gspo: ratio, above 1, beyond which a negative advantage has no gradient. 0: off.
    clip_dual: NonNegative = 3.0
    # Units with equal weight.
    aggregation: Literal["rollout", "token", "call", "constant"] = "rollout"
    token_divisor: Positive = 1024.0  # for constant: divisor of a rollout's sum, in tokens
    # Off-policy correction.
    proximal: Literal["behavior", "old"] = "behavior"  # policy in the ratio's denominator
    correction: Choice = "none"  # none, truncate or mask, by the ratio of old to behavior policy
    # Scope of one ratio.
    correction_level: Literal["token", "sequence", "sequence_mean"] = "token"
    # For mask: smallest ratio that is kept. None: 0.5, or 0.99 with sequence_mean, because a mean
    # over tokens hardly leaves 1.
    correction_low: NonNegative | None = None
    # For mask: largest ratio that is kept; for truncate: the cap. None: 2, or 1.01 likewise.
    correction_high: FinitePositive | None = None
    max_staleness: Natural = 4  # in trainer steps; older transitions are dropped and counted
    # Additional loss terms.
    kl_coef: NonNegative = 0.0  # weight of the KL to the reference; 0: only dpo keeps a reference
    # k1: x, k2: x^2 / 2, k3: exp(-x) - 1 + x, with x = log p - log p_ref of a sampled token.
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"  # reward: subtract the rest of the KL from advantages
    entropy_coef: NonNegative = 0.0  # weight of the entropy bonus per token, in nats
    # Value head, for learned and learned_token.
    value_learning_rate: Positive = 1e-3  # of the head's own Adam, without a schedule
    value_clip: NonNegative = 0.0  # maximum move of a value in one step, in reward units; 0: off
    value_coef: NonNegative = 0.0  # weight of the value loss for the policy; 0: only the head's
    # Several policies: independent updates (each from its own calls), or one joint update.
    policy_updates: Literal["independent", "joint"] = "independent"
    value_heads: Literal["per_policy", "shared"] = "per_policy"  # shared: with joint updates only
    # Updates.
    num_epochs: Count = 1  # passes over the data of one step
    num_minibatches: Count = 1  # optimizer updates per pass
    skip_zero_advantage: bool = True  # leave out rows without a gradient; the update is the same
    max_nonfinite_steps: Count = 5  # stop after this many steps in a row without a finite gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_names()
        self._check_preferences()
        self._check_gspo()
        self._check_raft()
        require(
            self,
            overlong_buffer=(
                (self.overlong_buffer or 0) <= (self.overlong_max_tokens or math.inf),
                f"at most overlong_max_tokens={self.overlong_max_tokens}",
            ),
            clip_dual=(self.clip_dual == 0 or self.clip_dual > 1, "above 1, or 0 (off)"),
            correction=(
                self.correction != "truncate"
                or self.proximal == "old"
                or self.loss in ("reinforce", "raft"),
                "none or mask, because the ratio of this loss is to the behavior policy already; "
                "or set proximal to old",
                "conflict",
            ),
            correction_high=(
                self.correction_bounds[1] > self.correction_bounds[0],
                f"above correction_low={self.correction_bounds[0]:g}",
            ),
            value_heads=(
                self.value_heads != "shared" or self.policy_updates == "joint",
                "per_policy, because policy_updates=independent shares no parameters",
                "conflict",
            ),
            value_coef=(
                self.value_coef == 0 or self.has_critic,
                "0, because credit is neither learned nor learned_token",
            ),
        )

    def _check_names(self) -> None:
        for name, choices in {
            "credit": ("identical", "per_step", "turn_groups", "learned", "learned_token"),
            "baseline": (*GROUP_BASELINES, "batch_mean", "none"),
            "loss": ("clip", "gspo", "cispo", "reinforce", "raft", "dpo"),
            "correction": ("none", "truncate", "mask"),
        }.items():
            expected = f"{', '.join(choices)} or FILE:FUNCTION"
            value = getattr(self, name)
            require(self, **{name: (value in choices or is_custom(value), expected, "unknown")})

    def _check_preferences(self) -> None:
        """Refuse settings that DPO would otherwise ignore."""
        if self.loss != "dpo":
            return
        for name, only in {
            "credit": "identical",
            "correction": "none",
            "overlong_filter": False,
            "kl_coef": 0.0,
            "entropy_coef": 0.0,
            "policy_updates": "independent",
            "num_minibatches": 1,
        }.items():
            expected = f"{only}, because loss is dpo"
            require(self, **{name: (getattr(self, name) == only, expected, "conflict")})

    def _check_raft(self) -> None:
        """Refuse credit that differs between calls, because the best rollout is learned whole."""
        is_whole = self.loss != "raft" or self.credit == "identical" or is_custom(self.credit)
        require(self, credit=(is_whole, "identical, because loss is raft", "conflict"))

    def _check_gspo(self) -> None:
        """Refuse clip bounds smaller than the sampler-trainer gap in bfloat16."""
        if self.loss == "gspo" and self.proximal == "behavior":
            least = 1e-2
            for name in ("clip_low", "clip_high"):
                expected = f"at least {least:g} where loss is gspo; or set proximal to old"
                require(self, **{name: (getattr(self, name) >= least, expected, "conflict")})

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


INITIAL_TEACHER = "initial"
TOP_K = 64  # likeliest tokens of a teacher in this process
SERVER_TOP_K = 20  # most that vLLM gives by default, and `lightning-jax serve`
GROUP_BASELINES = ("group_mean", "leave_one_out")  # compare the rollouts of a group


@dataclass(frozen=True)
class DistillConfig(Section):
    """Distillation of a teacher into the policy, at the tokens that the policy sampled.

    The loss is that of the rewards, with advantages times `reward_coef`, plus `coef` times the KL
    to the teacher in nats, with the weights of the tokens.
    """

    # Directory, file or hub id of a model with the policy's vocabulary, or initial: the model that
    # the run starts from. None: no teacher or, with a hint, the policy at the step's weights.
    teacher: PathOrName | None = None
    # OpenAI-compatible server that scores tokens instead (completions with echo and logprobs), such
    # as http://localhost:8000/v1. Its model has the policy's vocabulary.
    teacher_url: str | None = None
    served_model: str | None = None  # with a URL: model to request
    api_key_env: str | None = None  # with a URL: environment variable with the key
    # FILE:FUNCTION, task -> text that only the teacher reads; see docs/howto/learn_from_hints.md.
    hint: FunctionRef | None = None
    # forward: KL(teacher, policy) over the teacher's likeliest tokens, which teaches what the
    # policy never samples; reverse: KL(policy, teacher) over the same tokens; sampled: the reverse
    # KL estimated from the sampled token alone, in the advantages.
    kl: Literal["forward", "reverse", "sampled"] = "forward"
    # Tokens that the teacher names at each sampled one; the others count as one. Unused by sampled.
    # None: 64, or 20 with a URL, which is what servers allow.
    top_k: Count | None = None
    # Weight of the teacher in the first policy step. With forward, 1 is as strong as an advantage
    # of 1 on tokens that the teacher would sample.
    coef: NonNegative = 1.0
    # The same after anneal_steps policy steps, in a straight line from coef. None: coef.
    final_coef: NonNegative | None = None
    anneal_steps: Natural = 0  # policy steps from coef to final_coef
    reward_coef: NonNegative = 1.0  # weight of the rewards' advantages; 0: the teacher alone

    def __post_init__(self) -> None:
        super().__post_init__()
        anneals, has_url = self.final_coef is not None, self.teacher_url is not None
        require(
            self,
            teacher_url=(
                not has_url or is_plain_url(self.teacher_url or ""),
                "an http(s) URL without a user, query or fragment",
            ),
            teacher=(
                not has_url or self.teacher is None,
                "none with distill.teacher_url",
                "conflict",
            ),
            served_model=(
                has_url == (self.served_model is not None),
                "the model to request with distill.teacher_url, else none",
            ),
            api_key_env=(
                self.api_key_env is None or has_url,
                "none, because only a URL needs a key",
            ),
            anneal_steps=(
                anneals == (self.anneal_steps > 0),
                "at least 1 with distill.final_coef" if anneals else "0 without distill.final_coef",
                "conflict",
            ),
        )

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


@dataclass(frozen=True)
class BatchConfig(Section):
    """Shape of a batch. A microbatch has `rows` rows."""

    rows: Count = 1  # rows of a microbatch; gradients are summed over the microbatches
    # Nodes per row, at least serve.max_len. None: serve.max_len, or 512 if that is more.
    row_len: RowLength = DERIVED
    # Sampled tokens per row; equal tokens of siblings count separately. None: row_len, or 1024 if
    # that is more, rounded up to a multiple of head_chunk.
    max_targets: Size = DERIVED
    # Targets whose logits are in memory at once; divides max_targets. None: the divisor that is
    # nearest to 256.
    head_chunk: Size = DERIVED

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = None in (self.max_targets, self.head_chunk) or not (
            self.max_targets % self.head_chunk
        )
        require(self, head_chunk=(divides, f"a divisor of max_targets={self.max_targets}"))

    def with_sizes(self, max_len: int) -> "BatchConfig":
        """Return the settings with all sizes, for sequences of up to `max_len` tokens."""
        row_len = self.row_len or max(ROW_LEN, max_len)
        chunk = self.head_chunk or HEAD_CHUNK
        targets = self.max_targets or math.ceil(max(MAX_TARGETS, row_len) / chunk) * chunk
        divisors = (size for size in range(1, targets + 1) if targets % size == 0)
        nearest = min(divisors, key=lambda size: abs(math.log(size / HEAD_CHUNK)))
        return replace(
            self, row_len=row_len, max_targets=targets, head_chunk=self.head_chunk or nearest
        )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Settings of AdamW and its learning rate."""

    learning_rate: Positive = 1e-6  # peak, after the rise and before the decay
    warmup_steps: Natural = 0  # updates over which the rate rises linearly from 0
    # Updates of cosine decay to a tenth of the rate, after the warm-up. None: constant.
    decay_steps: Count | None = None
    weight_decay: NonNegative = 0.0  # of matrices, times the learning rate
    b1: Annotated[float, Ge(0), Lt(1)] = 0.9  # decay of the first moments, per update
    b2: Annotated[float, Ge(0), Lt(1)] = 0.95  # decay of the second moments, per update
    eps: Positive = 1e-8  # added to the root of the second moments
    max_grad_norm: Positive = 1.0  # a gradient with a larger norm is scaled down to it
    # Dtype of AdamW's first moments. bfloat16 halves their memory.
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
