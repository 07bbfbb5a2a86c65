"""Compare ways to train two policies that must agree on a code: one frozen, separate, or joint.

    python benchmarks/policies.py [--seeds 10] [--steps 120] [--plot docs/results/policies.png]

In each of NUM_ROUNDS rounds a speaker sees one of NUM_SYMBOLS symbols and says one token. A
listener must guess the symbol from that token. Neither sees the other's input. Both see the round
and the number of right guesses so far. The common return is the share of right guesses, known at
the end. At first they say any of all tokens, so they must agree on a code. If one of them does not
learn, the other can only adapt to its random choices.

Each policy is an adapter on the same frozen random base. Runs differ only in who learns and how
credit is assigned. Credit, advantages, forest batches, loss and optimizer are those of a training
run. Rollouts are sampled here, because a server would take most of the time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from credit import bootstrap
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense
from lightning_jax.models.transformer import Params, forward, init_params, unembed
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.prepare import prepare_policies
from lightning_jax.rl.update.updater import Updater
from lightning_jax.traces.roles import only_trained
from lightning_jax.train.config import Config
from lightning_jax.train.state.updaters import phase_updater
from lightning_jax.types import Trajectory, Transition

ROLES = ("speaker", "listener")
NUM_ROUNDS = 3
NUM_SYMBOLS = 4  # tokens 0 to 3
FIRST_COUNT = NUM_SYMBOLS  # token for 0 right guesses so far; more follow
FIRST_ROUND = FIRST_COUNT + NUM_ROUNDS  # token of the first round; later ones follow
NUM_GROUPS, GROUP_SIZE = 4, 8
LORA = LoraConfig(rank=8, alpha=16.0)
MODEL = adapted_shape(
    DecoderConfig(
        DecoderShape(
            vocab_size=12, embed_dim=32, blocks=(Block(Attention(4, 2, 8), Dense(64)),),
            tie_embeddings=False,
        )
    ),
    LORA,
    len(ROLES),
)  # fmt: skip
BATCH = BatchConfig(rows=2, row_len=128, max_targets=128, head_chunk=128)
LEARNING_RATE, VALUE_LEARNING_RATE, NUM_EPOCHS = 3e-3, 3e-3, 2
LAST = 10  # final steps that a run's result is averaged over
HALF, FULL = ({"credit": "learned", "gae_lambda": gae_lambda} for gae_lambda in (0.5, 1.0))
JOINT, SHARED = {"policy_updates": "joint"}, {"value_heads": "shared"}
# For each name: the frozen policy, if any, and changes to the algorithm.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen listener": ("listener", {}),
    "frozen speaker": ("speaker", {}),
    "independent": ("", {}),
    "joint": ("", JOINT),
    "independent, learned, lambda 1": ("", FULL),
    "joint, a head each, lambda 1": ("", JOINT | FULL),
    "joint, one head, lambda 1": ("", JOINT | FULL | SHARED),
    "independent, learned, lambda 0.5": ("", HALF),
    "joint, a head each, lambda 0.5": ("", JOINT | HALF),
    "joint, one head, lambda 0.5": ("", JOINT | HALF | SHARED),
}


def first_params(key: Array) -> Params:
    """Return a random base and adapters that do nothing yet.

    Its states and logits are as large as a trained model's.
    """
    params = init_params(MODEL, key)
    grown = jax.tree.map(
        lambda w: w * (50 / MODEL.shape.embed_dim**0.5) if w.ndim == 2 else w, params
    )
    head = {"kernel": 10.0 * params["head"]["kernel"]}
    return grown | {"head": head}


@jax.jit
def sample(
    params: Params, key: Array, symbols: Int[Array, "N T"]
) -> tuple[Int[Array, "N T P"], Int[Array, "N T"], Float[Array, "N T"]]:
    """Return (prompts, tokens said, their log-probs) of the calls of each rollout.

    The order is speaker and listener of the first round, of the second, and so on.
    """
    num, rounds = symbols.shape
    positions = jnp.broadcast_to(jnp.arange(3), (num, 3))

    def say(adapter: int, key: Array, *prompt: Array) -> tuple[Array, Array, Array]:
        tokens, chosen = jnp.stack(prompt, axis=1), jnp.full(num, adapter)
        hidden, _ = forward(params, MODEL, tokens, positions, adapters=chosen)
        logprobs = jax.nn.log_softmax(unembed(params, MODEL, hidden[:, -1]))
        token = jax.random.categorical(key, logprobs).astype(jnp.int32)
        return tokens, token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]

    def one_round(count: Array, turn: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        index, symbol, key = turn
        prompt = jnp.full_like(count, FIRST_ROUND) + index, FIRST_COUNT + count
        keys = jax.random.split(key)
        spoken = say(0, keys[0], *prompt, symbol)
        guessed = say(1, keys[1], *prompt, spoken[1])
        calls = jax.tree.map(lambda *pair: jnp.stack(pair, axis=1), spoken, guessed)
        return count + (guessed[1] == symbol), calls

    turns = jnp.arange(rounds, dtype=jnp.int32), symbols.T, jax.random.split(key, rounds)
    _, calls = jax.lax.scan(one_round, jnp.zeros(num, jnp.int32), turns)
    # [T, N, 2, ...] to [N, 2 T, ...]
    return jax.tree.map(
        lambda leaf: leaf.swapaxes(0, 1).reshape(num, 2 * rounds, *leaf.shape[3:]), calls
    )


def to_trajectories(
    symbols: Int[np.ndarray, "N T"], calls_of_round: tuple[Any, Any, Any], frozen: str
) -> list[Trajectory]:
    """Return the records that a run would read from its store."""
    prompts, responses, logprobs = map(np.asarray, calls_of_round)
    returns = (responses[:, 1::2] == symbols).mean(axis=1)
    trajectories = []
    for i in range(len(symbols)):
        calls = []
        for t in range(2 * NUM_ROUNDS):
            role, logprob = ROLES[t % 2], (logprobs[i, t].item(),)
            call = Transition(
                call_id=f"{i}/{t}",
                rollout_id=str(i),
                prompt_token_ids=tuple(prompts[i, t].tolist()),
                response_token_ids=(responses[i, t].item(),),
                behavior_logprobs=logprob,
                sampling_logprobs=logprob,
                policy_versions=(0,),
                finish_reason="stop",
                agent=role,
                answered_by=role,
                trains=role != frozen,
            )
            calls.append(call)
        whole = Trajectory(str(i), str(i // GROUP_SIZE), tuple(calls), returns[i].item())
        trajectories.append(only_trained(whole))
    return trajectories


def make(frozen: str, algorithm: AlgorithmConfig, learning_rate: float) -> tuple[Updater, Config]:
    config = Config(
        model=ModelConfig(lora=LORA),
        policies={role: PolicyConfig(trains=role != frozen) for role in ROLES},
        algorithm=algorithm,
        serve=ServeConfig(max_len=BATCH.row_len),
        batch=BATCH,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        mesh=MeshConfig(fsdp=1),
    )
    return phase_updater(MODEL, config, supervised=False), config


def run(learner: Updater, config: Config, frozen: str, seed: int, steps: int) -> list[float]:
    """Return the mean return of each step."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    state, returns = learner.init(first_params(key)), []
    for step in range(steps):
        tasks = rng.integers(NUM_SYMBOLS, size=(NUM_GROUPS, NUM_ROUNDS))
        symbols = np.repeat(tasks, GROUP_SIZE, axis=0).astype(np.int32)
        calls = sample(state.weights, jax.random.fold_in(key, step), jnp.asarray(symbols))
        trajectories = to_trajectories(symbols, calls, frozen)
        returns.append(float(np.mean([trajectory.reward for trajectory in trajectories])))
        values, _ = learner.values(state, trajectories)
        sequences, _ = prepare_policies(
            trajectories, config.algorithm, config.policy_table, policy_version=0, values=values
        )
        state, _ = learner.update(state, sequences, None)
    return returns


def report(name: str, runs: list[list[float]], axes: Any) -> None:
    """Print the returns of the last steps and of all steps, and draw the curve."""
    rng, curves = np.random.default_rng(0), np.asarray(runs)
    ends, whole = curves[:, -LAST:].mean(axis=1), curves.mean(axis=1)
    mean, low, high = bootstrap(np.stack([ends, whole], axis=1), rng)
    end, over = (f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in zip(mean, low, high, strict=True))
    print(f"{name:<34} {end:<24} {over}", flush=True)
    smooth = np.apply_along_axis(lambda c: np.convolve(c, np.ones(5) / 5, "valid"), 1, curves)
    mean, low, high = bootstrap(smooth, rng)
    steps = np.arange(len(mean)) + 2
    (line,) = axes.plot(steps, mean, label=f"{name}: {end}")
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--value-learning-rate", type=float, default=VALUE_LEARNING_RATE)
    parser.add_argument("--plot", default="docs/results/policies.png")
    parser.add_argument("--json", help="where to write each run's mean returns, step by step")
    args = parser.parse_args()
    started, everything = time.monotonic(), {}
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    print(f"{'':<34} {f'return of the last {LAST} steps':<24} of all")
    for name in args.only:
        frozen, changes = SETTINGS[name]
        algorithm = AlgorithmConfig(
            num_epochs=NUM_EPOCHS, value_learning_rate=args.value_learning_rate, **changes
        )
        learner, config = make(frozen, algorithm, args.learning_rate)
        runs = [run(learner, config, frozen, seed, args.steps) for seed in range(args.seeds)]
        report(name, runs, axes)
        everything[name] = runs
    chance = "a guess among the symbols"
    axes.axhline(1 / NUM_SYMBOLS, color="grey", linewidth=0.5, label=chance)
    axes.set(title="speaker and listener", xlabel="step", ylabel="share of right guesses")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(args.plot, dpi=120)
    if args.json:
        Path(args.json).write_text(json.dumps(everything))
    print(f"{time.monotonic() - started:.0f} s; {args.plot}")


if __name__ == "__main__":
    main()
