"""Compare credit schemes by the steps that an agent with many calls needs to learn.

    python benchmarks/credit.py [--seeds 20] [--max-steps 100] [--plot docs/results/credit.png]

An agent answers NUM_CALLS questions in a row. The prompt of a call has its position, the number of
right answers so far, and the question. Each question has one right answer at every position. The
return of a rollout is the share of right answers. It is earned at the end, which is all that most
agents report, or call by call. A rollout succeeds if all answers are right.

Runs differ only in how credit is assigned. Credit, advantages, forest batches, loss and optimizer
are those of a training run. The model is a decoder with one layer. Rollouts are sampled here,
because a server would take most of the time.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense
from lightning_jax.models.transformer import Params, forward, init_params, unembed
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.update.updater import Updater
from lightning_jax.train.config import Config
from lightning_jax.train.state.updaters import phase_updater
from lightning_jax.types import Trajectory, Transition

NUM_CALLS = 16
NUM_ANSWERS = 4  # tokens 0 to 3; question k has the right answer k + 1, question 3 has 0
FIRST_COUNT = NUM_ANSWERS  # token for 0 right answers so far; more follow
FIRST_TURN = FIRST_COUNT + NUM_CALLS  # token of the first call; later ones follow
NUM_GROUPS, GROUP_SIZE = 2, 8
WINDOW = 4  # steps over which success is averaged
TARGET = 0.9
MODEL = DecoderConfig(
    DecoderShape(
        vocab_size=FIRST_TURN + NUM_CALLS, embed_dim=32,
        blocks=(Block(Attention(4, 2, 8), Dense(64)),), tie_embeddings=False,
    )
)  # fmt: skip
BATCH = BatchConfig(rows=1, row_len=1024, max_targets=256, head_chunk=256)
NUM_EPOCHS = 4
LEARNING_RATE, VALUE_LEARNING_RATE = 3e-3, 1e-2
REWARDS = ("one reward at the end", "a reward a call")
SCHEMES: dict[str, dict[str, Any]] = {
    "identical": {"credit": "identical"},
    "per step": {"credit": "per_step"},
    "learned, lambda 1": {"credit": "learned", "gae_lambda": 1.0},
    "learned, lambda 0.9": {"credit": "learned", "gae_lambda": 0.9},
    "learned, lambda 0.5": {"credit": "learned", "gae_lambda": 0.5},
}
ONLY_WITH_CALL_REWARDS = ("per step",)  # with one reward at the end it equals "identical"


def first_params(key: Array) -> Params:
    """Return random weights as large as a trained model's, with an output that starts uniform.

    With large weights, hidden states change little while the output learns from them.
    """
    params = init_params(MODEL, key)
    grown = jax.tree.map(
        lambda w: w * (50 / MODEL.shape.embed_dim**0.5) if w.ndim == 2 else w, params
    )
    return grown | {"head": params["head"]}


@jax.jit
def sample(
    params: Params, key: Array, questions: Int[Array, "N T"]
) -> tuple[Int[Array, "N T P"], Int[Array, "N T"], Float[Array, "N T"]]:
    """Return (prompts of turn, count and question, answers, their log-probs) for each call."""
    num, calls = questions.shape
    positions = jnp.broadcast_to(jnp.arange(3), (num, 3))

    def call(count: Array, turn: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        index, question, key = turn
        turn_token = jnp.full_like(count, FIRST_TURN) + index
        prompt = jnp.stack([turn_token, FIRST_COUNT + count, question], axis=1)
        hidden, _ = forward(params, MODEL, prompt, positions)
        logprobs = jax.nn.log_softmax(unembed(params, MODEL, hidden[:, -1]))
        answer = jax.random.categorical(key, logprobs).astype(jnp.int32)
        chosen = jnp.take_along_axis(logprobs, answer[:, None], axis=1)[:, 0]
        return count + is_right(question, answer), (prompt, answer, chosen)

    turns = jnp.arange(calls), questions.T, jax.random.split(key, calls)
    _, calls_made = jax.lax.scan(call, jnp.zeros(num, jnp.int32), turns)
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), calls_made)


def is_right(question: Any, answer: Any) -> Any:
    return answer == (question + 1) % NUM_ANSWERS


def to_trajectories(
    prompts: Int[np.ndarray, "N T P"],
    answers: Int[np.ndarray, "N T"],
    logprobs: Float[np.ndarray, "N T"],
    *,
    reward_per_call: bool,
) -> list[Trajectory]:
    """Return the records that a run would read from its store."""
    earned = is_right(prompts[:, :, -1], answers) / NUM_CALLS
    trajectories = []
    for i in range(len(prompts)):
        calls = tuple(
            Transition(
                call_id=f"{i}/{t}",
                rollout_id=str(i),
                prompt_token_ids=tuple(prompts[i, t].tolist()),
                response_token_ids=(answers[i, t].item(),),
                behavior_logprobs=(logprobs[i, t].item(),),
                sampling_logprobs=(logprobs[i, t].item(),),
                policy_versions=(0,),
                finish_reason="stop",
                reward=earned[i, t].item() if reward_per_call else 0.0,
            )
            for t in range(NUM_CALLS)
        )
        at_end = 0.0 if reward_per_call else earned[i].sum().item()
        trajectories.append(Trajectory(str(i), str(i // GROUP_SIZE), calls, at_end))
    return trajectories


def run(
    learner: Updater, algorithm: AlgorithmConfig, seed: int, *, reward_per_call: bool, steps: int
) -> tuple[list[float], list[float]]:
    """Return (share of successful rollouts, explained variance) for each step.

    Stop when the mean of WINDOW steps reaches TARGET.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    state = learner.init(first_params(key))
    successes, explained = [], []
    for step in range(steps):
        tasks = rng.integers(NUM_ANSWERS, size=(NUM_GROUPS, NUM_CALLS))
        questions = jnp.asarray(np.repeat(tasks, GROUP_SIZE, axis=0), jnp.int32)
        drawn = sample(state.params, jax.random.fold_in(key, step), questions)
        prompts, answers, logprobs = map(np.asarray, drawn)
        successes.append(float(is_right(questions, answers).all(axis=1).mean()))
        if np.mean(successes[-WINDOW:]) >= TARGET and step + 1 >= WINDOW:
            break
        trajectories = to_trajectories(prompts, answers, logprobs, reward_per_call=reward_per_call)
        values, _ = learner.values(state, trajectories)
        sequences, metrics = prepare_step(trajectories, algorithm, policy_version=0, values=values)
        explained.append(metrics.get("train/value_explained_variance", 0.0))
        state, _ = learner.update(state, sequences, None)
    return successes, explained


def make(
    scheme: str, learning_rate: float, value_learning_rate: float
) -> tuple[Updater, AlgorithmConfig]:
    algorithm = AlgorithmConfig(
        num_epochs=NUM_EPOCHS, value_learning_rate=value_learning_rate, **SCHEMES[scheme]
    )
    config = Config(
        algorithm=algorithm,
        batch=BATCH,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        mesh=MeshConfig(fsdp=1),
    )
    return phase_updater(MODEL, config, supervised=False), algorithm


def bootstrap(
    samples: Float[np.ndarray, "N T"], rng: np.random.Generator
) -> tuple[Float[np.ndarray, " T"], Float[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Return the mean over the first axis and its 95 % interval, from 2,000 resamples."""
    drawn = rng.integers(0, len(samples), (2000, len(samples)))
    means = np.asarray([samples[rows].mean(axis=0) for rows in drawn])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return samples.mean(axis=0), low, high


def curve(successes: Sequence[float], steps: int) -> list[float]:
    """Return running means over WINDOW steps. The last one is repeated to the end."""
    ends = [min(t, len(successes) - 1) + 1 for t in range(steps)]
    return [float(np.mean(successes[max(0, end - WINDOW) : end])) for end in ends]


def report(rewards: str, results: dict[str, list[list[float]]], steps: int, axes: Any) -> None:
    """Print a line for each scheme, and draw its curve."""
    rng = np.random.default_rng(0)
    for scheme, runs in results.items():
        mean, low, high = bootstrap(
            np.asarray([[len(successes)] for successes in runs], float), rng
        )
        reached = sum(np.mean(successes[-WINDOW:]) >= TARGET for successes in runs)
        text = f"{mean[0]:.1f} [{low[0]:.1f}, {high[0]:.1f}]"
        print(f"{rewards:>22}  {scheme:<20} {text:<22} {reached} of {len(runs)} got there")
        mean, low, high = bootstrap(
            np.asarray([curve(successes, steps) for successes in runs]), rng
        )
        color = f"C{list(SCHEMES).index(scheme)}"
        axes.plot(mean, label=f"{scheme}: {text} steps", color=color)
        axes.fill_between(np.arange(steps), low, high, color=color, alpha=0.2)
    axes.axhline(TARGET, color="grey", linewidth=0.5)
    axes.set(title=rewards, xlabel="step", ylabel="rollouts with all answers right")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--value-learning-rate", type=float, default=VALUE_LEARNING_RATE)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--plot", default="docs/results/credit.png")
    parser.add_argument("--json", help="where to write each run's shares of success, step by step")
    args = parser.parse_args()
    started, everything = time.monotonic(), {}
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    panels = figure.subplots(1, len(REWARDS), sharey=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for rewards, axes in zip(REWARDS, panels, strict=True):
        results: dict[str, list[list[float]]] = {}
        for scheme in SCHEMES:
            if rewards == REWARDS[0] and scheme in ONLY_WITH_CALL_REWARDS:
                continue
            learner, algorithm = make(scheme, args.learning_rate, args.value_learning_rate)
            per_call = rewards == REWARDS[1]
            results[scheme] = [
                run(learner, algorithm, seed, reward_per_call=per_call, steps=args.max_steps)[0]
                for seed in seeds
            ]
        report(rewards, results, args.max_steps, axes)
        everything[rewards] = results
    figure.savefig(args.plot, dpi=120)
    if args.json:
        Path(args.json).write_text(json.dumps(everything))
    print(f"{time.monotonic() - started:.0f} s on {jax.default_backend()}; {args.plot}")


if __name__ == "__main__":
    main()
