"""Settings of the learning algorithm, its batches and its optimizer."""

from dataclasses import dataclass

from lightning_jax.errors import require


@dataclass(frozen=True)
class AlgorithmConfig:
    """Settings that turn rewards into a loss. docs/algorithms.md lists them for each algorithm."""

    # Rewards and the choice of rollouts.
    credit: str = "identical"  # identical, per_step, turn_groups, learned or learned_token
    discount: float = 1.0  # per call, or per token with learned_token; unused by identical
    gae_lambda: float = 1.0  # for learned and learned_token; 1: unbiased for any values
    overlong_penalty: float = 0.0  # maximum penalty for a long response, in reward units; 0: off
    overlong_max_tokens: int = 1024  # response length, in tokens, that gets the full penalty
    overlong_buffer: int = 256  # tokens before that length over which the penalty rises from 0
    # Maximum rounds of rollouts in one step. Each extra round replaces groups with equal returns
    # by other tasks; such groups are never trained on. 1: replace no group.
    max_sampling_rounds: int = 1
    # Advantages.
    baseline: str = "group_mean"  # group_mean, leave_one_out, batch_mean or none
    normalize: str = "group_std"  # divisor of the advantages: group_std, batch_std or none
    # Loss of a token, and its weight.
    loss: str = "clip"  # clip (PPO, per token), gspo (per call), cispo, reinforce or dpo
    dpo_beta: float = 0.1  # for dpo: strength of the penalty for leaving the reference
    clip_low: float = 0.2  # distance of the lower bound from ratio 1; 1: no lower bound
    clip_high: float = 0.2  # distance of the upper bound from ratio 1
    # For clip and gspo: ratio above which a negative advantage has no gradient. 0: off.
    clip_dual: float = 3.0
    aggregation: str = "rollout"  # units with equal weight: rollout, token, call or constant
    token_divisor: float = 1024.0  # for constant: divisor of a rollout's sum, in tokens
    # Off-policy correction.
    proximal: str = "behavior"  # policy in the ratio's denominator: behavior or old
    correction: str = "none"  # none, truncate or mask, by the ratio of old to behavior policy
    correction_level: str = "token"  # scope of one ratio: token, sequence or sequence_mean
    correction_low: float = 0.5  # for mask: smallest ratio that is kept
    correction_high: float = 2.0  # for mask: largest ratio that is kept; for truncate: the cap
    max_staleness: int = 4  # in trainer steps; older transitions are dropped and counted
    # Additional loss terms.
    kl_coef: float = 0.0  # weight of the KL to the reference; 0: only dpo keeps a reference
    kl_estimator: str = "k3"  # k1, k2 or k3
    kl_in: str = "loss"  # loss, or reward (subtract the remaining KL from each advantage)
    entropy_coef: float = 0.0  # weight of the entropy bonus per token, in nats
    # Value head, for learned and learned_token.
    value_learning_rate: float = 1e-3  # of the head's own Adam, without a schedule
    value_clip: float = 0.0  # maximum move of a value in one step, in reward units; 0: no limit
    value_coef: float = 0.0  # weight of the value loss for the policy; 0: only the head learns
    # Several policies.
    policy_updates: str = "independent"  # independent (each from its own calls) or joint (one step)
    value_heads: str = "per_policy"  # per_policy, or shared if policy_updates is joint
    # Updates.
    num_epochs: int = 1  # passes over the data of one step
    num_minibatches: int = 1  # optimizer updates per pass
    skip_zero_advantage: bool = True  # leave out rows without a gradient; the update is the same
    max_nonfinite_steps: int = 5  # stop after this many steps in a row without a finite gradient

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_preferences()
        self._check_gspo()
        require(
            self,
            discount=(0 < self.discount <= 1, "above 0 and at most 1"),
            overlong_penalty=(self.overlong_penalty >= 0, "0 (off) or more"),
            overlong_buffer=(
                0 <= self.overlong_buffer <= self.overlong_max_tokens,
                f"0 to overlong_max_tokens={self.overlong_max_tokens}",
            ),
            max_sampling_rounds=(self.max_sampling_rounds >= 1, "at least 1"),
            clip_low=(0 < self.clip_low <= 1, "above 0 and at most 1"),
            clip_high=(self.clip_high > 0, "a positive number"),
            clip_dual=(self.clip_dual == 0 or self.clip_dual > 1, "above 1, or 0 (off)"),
            token_divisor=(self.token_divisor > 0, "a positive number of tokens"),
            correction=(
                self.correction != "truncate" or self.proximal == "old" or self.loss == "reinforce",
                "none or mask, because the ratio of this loss is to the behavior policy already; "
                "or set proximal to old",
                "conflict",
            ),
            correction_low=(self.correction_low >= 0, "0 or more"),
            correction_high=(
                self.correction_high > self.correction_low,
                f"above correction_low={self.correction_low}",
            ),
            max_staleness=(self.max_staleness >= 0, "0 or more"),
            kl_coef=(self.kl_coef >= 0, "0 or more"),
            entropy_coef=(self.entropy_coef >= 0, "0 or more"),
            gae_lambda=(0 <= self.gae_lambda <= 1, "0 to 1"),
            value_learning_rate=(self.value_learning_rate > 0, "a positive number"),
            value_clip=(self.value_clip >= 0, "0 (off) or more"),
            value_heads=(
                self.value_heads != "shared" or self.policy_updates == "joint",
                "per_policy, because policy_updates=independent shares no parameters",
                "conflict",
            ),
            value_coef=(
                self.value_coef >= 0 and (self.value_coef == 0 or self.has_critic),
                "0 or more, and 0 unless credit is learned or learned_token",
            ),
            num_epochs=(self.num_epochs >= 1, "at least 1"),
            num_minibatches=(self.num_minibatches >= 1, "at least 1"),
            max_nonfinite_steps=(self.max_nonfinite_steps >= 1, "at least 1"),
        )

    def _check_choices(self) -> None:
        for name, choices in {
            "credit": ("identical", "per_step", "turn_groups", "learned", "learned_token"),
            "baseline": ("group_mean", "leave_one_out", "batch_mean", "none"),
            "normalize": ("group_std", "batch_std", "none"),
            "loss": ("clip", "gspo", "cispo", "reinforce", "dpo"),
            "aggregation": ("rollout", "token", "call", "constant"),
            "proximal": ("behavior", "old"),
            "correction": ("none", "truncate", "mask"),
            "correction_level": ("token", "sequence", "sequence_mean"),
            "kl_estimator": ("k1", "k2", "k3"),
            "kl_in": ("loss", "reward"),
            "policy_updates": ("independent", "joint"),
            "value_heads": ("per_policy", "shared"),
        }.items():
            expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
            require(self, **{name: (getattr(self, name) in choices, expected, "unknown")})

    def _check_preferences(self) -> None:
        """Refuse settings that DPO would otherwise ignore."""
        require(self, dpo_beta=(self.dpo_beta > 0, "a positive number"))
        if self.loss != "dpo":
            return
        for name, only in {
            "credit": "identical",
            "correction": "none",
            "kl_coef": 0.0,
            "entropy_coef": 0.0,
            "policy_updates": "independent",
            "num_minibatches": 1,
        }.items():
            expected = f"{only}, because loss is dpo"
            require(self, **{name: (getattr(self, name) == only, expected, "conflict")})

    def _check_gspo(self) -> None:
        """Refuse clip bounds smaller than the sampler-trainer gap in bfloat16."""
        if self.loss == "gspo" and self.proximal == "behavior":
            least = 1e-2
            for name in ("clip_low", "clip_high"):
                expected = f"at least {least:g} where loss is gspo; or set proximal to old"
                require(self, **{name: (getattr(self, name) >= least, expected, "conflict")})

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
        """True if a token without an advantage has no gradient: no KL, entropy or value term."""
        return self.kl_coef == 0 and self.entropy_coef == 0 and not self.has_critic

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss reads the trainer's log-probabilities from before the first update."""
        return self.proximal == "old" or (self.kl_coef > 0 and self.kl_in == "reward")


@dataclass(frozen=True)
class BatchConfig:
    """Shape of a batch. A microbatch has `rows` rows."""

    rows: int = 1  # rows of a microbatch; gradients are summed over the microbatches
    row_len: int = 2048  # nodes per row
    max_targets: int = 1024  # sampled tokens per row; equal tokens of siblings count separately
    head_chunk: int = 256  # targets whose logits are in memory at once; divides max_targets

    def __post_init__(self) -> None:
        require(
            self,
            rows=(self.rows >= 1, "at least 1"),
            row_len=(self.row_len >= 16, "at least 16"),
            max_targets=(self.max_targets >= 1, "at least 1"),
            head_chunk=(
                self.head_chunk >= 1 and self.max_targets % self.head_chunk == 0,
                f"a divisor of max_targets={self.max_targets}",
            ),
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and its learning rate."""

    learning_rate: float = 1e-6
    warmup_steps: int = 0  # updates over which the rate rises linearly from 0
    # Updates of cosine decay to a tenth of the rate, after the warm-up. None: constant.
    decay_steps: int | None = None
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    mu_dtype: str = "float32"  # dtype of AdamW's first moments; bfloat16 halves their memory

    def __post_init__(self) -> None:
        require(
            self,
            learning_rate=(self.learning_rate > 0, "a positive number"),
            warmup_steps=(self.warmup_steps >= 0, "0 or more"),
            decay_steps=(self.decay_steps is None or self.decay_steps >= 1, "at least 1, or none"),
            weight_decay=(self.weight_decay >= 0, "0 or more"),
            b1=(0 <= self.b1 < 1, "0 up to, but not, 1"),
            b2=(0 <= self.b2 < 1, "0 up to, but not, 1"),
            eps=(self.eps > 0, "a positive number"),
            max_grad_norm=(self.max_grad_norm > 0, "a positive number"),
            mu_dtype=(self.mu_dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
        )
