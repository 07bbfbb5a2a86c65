"""Sections of the settings: the algorithm, its batches, the optimizer and the warm-up."""

from dataclasses import dataclass, field

from lightning_jax.config_sections import require


@dataclass(frozen=True)
class AlgorithmConfig:
    """From rewards to a loss; docs/algorithms.md says which settings make which algorithm."""

    # Rewards, and the rollouts that are trained on.
    credit: str = "identical"  # identical, per_step, turn_groups, learned or learned_token
    discount: float = 1.0  # of all but identical, between calls; of learned_token, between tokens
    gae_lambda: float = 1.0  # of learned and learned_token; 1: unbiased whatever the values
    overlong_penalty: float = 0.0  # most that a long response costs, in reward units; 0: nothing
    overlong_max_tokens: int = 1024  # tokens of a response from which it costs all of that
    overlong_buffer: int = 256  # tokens before there, over which the cost rises from 0
    # Rounds of rollouts a step may take. In each further one other tasks replace the groups whose
    # returns are all equal, and such groups are never trained on. 1: no group is replaced.
    max_sampling_rounds: int = 1
    # Advantages.
    baseline: str = "group_mean"  # group_mean, leave_one_out, batch_mean or none
    normalize: str = "group_std"  # group_std, batch_std or none: what advantages are divided by
    # What a token's gradient is, and how much it weighs.
    loss: str = "clip"  # clip (PPO, per token), gspo (per call), cispo, reinforce or dpo
    dpo_beta: float = 0.1  # of dpo: how dearly a step away from the reference is bought
    clip_low: float = 0.2  # below 1; 1 is no lower bound
    clip_high: float = 0.2  # above 1
    clip_dual: float = 3.0  # of clip and gspo: ratio that ends a negative advantage; 0: none
    aggregation: str = "rollout"  # rollout, token, call or constant: what weighs the same
    token_divisor: float = 1024.0  # of constant: the tokens by which a rollout's sum is divided
    # Off-policy correction.
    proximal: str = "behavior"  # the policy in the ratio's denominator: behavior, or old
    correction: str = "none"  # none, truncate or mask, by the ratio of old to behavior policy
    correction_level: str = "token"  # token, sequence or sequence_mean: what has one ratio
    correction_low: float = 0.5  # of mask: the least ratio that is kept
    correction_high: float = 2.0  # of mask: the largest that is kept; of truncate: the ceiling
    max_staleness: int = 4  # trainer steps; older transitions are dropped and counted
    # Terms beside the policy gradient.
    kl_coef: float = 0.0  # of the KL to the reference policy; 0: only dpo keeps a reference
    kl_estimator: str = "k3"  # k1, k2 or k3
    kl_in: str = "loss"  # loss, or reward (each token's advantage loses the KL still to come)
    entropy_coef: float = 0.0  # of the bonus for the entropy of each token's distribution, in nats
    # The value head of learned and learned_token.
    value_learning_rate: float = 1e-3  # of its own Adam, without a schedule
    value_clip: float = 0.0  # how far a value learns to move in a step, in reward units; 0: any
    value_coef: float = 0.0  # of the value loss in the policy's gradient; 0: the head alone learns
    # Several policies.
    policy_updates: str = "independent"  # independent (each from its own calls) or joint (one step)
    value_heads: str = "per_policy"  # per_policy, or shared where policy_updates is joint
    # Updates.
    num_epochs: int = 1  # passes over the data of a step
    num_minibatches: int = 1  # optimizer updates of a pass
    skip_zero_advantage: bool = True  # leave out rows that cannot move the weights; same gradient
    max_nonfinite_steps: int = 5  # in a row without a finite gradient; then the run stops

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
                "per_policy, as policy_updates=independent shares nothing between them",
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
        """What DPO has no place for is refused rather than ignored."""
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
        """Refuse bounds that the gap of sampler and trainer exceeds in bfloat16."""
        if self.loss == "gspo" and self.proximal == "behavior":
            least = 1e-2
            for name in ("clip_low", "clip_high"):
                expected = f"at least {least:g} where loss is gspo; or set proximal to old"
                require(self, **{name: (getattr(self, name) >= least, expected, "conflict")})

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the policy is kept from the beginning of the policy phase."""
        return self.kl_coef > 0 or self.loss == "dpo"

    @property
    def has_critic(self) -> bool:
        """Whether a value head is trained."""
        return self.credit in ("learned", "learned_token")

    @property
    def has_only_policy_gradient(self) -> bool:
        """Whether a token without an advantage has no gradient: no KL, entropy or value term."""
        return self.kl_coef == 0 and self.entropy_coef == 0 and not self.has_critic

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss reads the trainer's own log-probs before the step's first update."""
        return self.proximal == "old" or (self.kl_coef > 0 and self.kl_in == "reward")


@dataclass(frozen=True)
class BatchConfig:
    rows: int = 1  # rows of one microbatch; gradients of microbatches are added up
    row_len: int = 2048  # nodes of a row
    max_targets: int = 1024  # sampled tokens of a row; siblings' same tokens count each
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
    learning_rate: float = 1e-6
    warmup_steps: int = 0  # steps of linear rise from 0
    decay_steps: int | None = None  # steps of cosine fall to a tenth after the rise; None: constant
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    mu_dtype: str = "float32"  # of AdamW's first moments; bfloat16 takes half their memory

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


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on demonstrations before the first rollout."""

    num_steps: int = 0
    demonstrations: str | None = None  # FILE:FUNCTION: list of tasks -> list of conversations
    group_by: str | None = None  # a field of the tasks: those that share it share a long prefix...
    group_size: int = (
        8  # ...so this many of them are shown in one step, where their trie is shallow
    )
    groups_per_step: int = 4
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))

    def __post_init__(self) -> None:
        require(
            self,
            group_size=(self.group_size >= 1, "at least 1"),
            groups_per_step=(self.groups_per_step >= 1, "at least 1"),
            num_steps=(self.num_steps >= 0, "0 or more"),
            demonstrations=(
                self.num_steps == 0 or self.demonstrations is not None,
                "FILE:FUNCTION when warmup.num_steps is above 0",
            ),
        )
