"""Train on a task without a right answer under four rewards, and look for gaming.

The agent, agents/note_writer.py, writes a sentence with two given words.

    proxy      similarity of request and note by a sentence encoder
    proxy_kl   the same, with a penalty for the distance to the initial model
    judge      the initial model compares the notes of a group
    rubric     a check of topic and words, and the initial model as a judge with a rubric

Held out from all four is a measure of greedy notes for unseen requests. It is the mean of three
numbers between 0 and 1: the probability of a token under the initial model (geometric mean over the
note), the share of word 3-grams that repeat nothing, and whether the note is one whole sentence.

    python experiments/openended.py --config experiments/configs/openended_cpu.yaml [key=value ...]
        [--reward proxy --reward rubric] [--seeds 3] [--first-seed 0] [--jobs 2] [--report]

Two runs train at once, which takes 12 GB; `--jobs 1` trains one. They are in `run_dir`, and
finished ones are kept. The end of the output is a table, with notes of the first requests.
openended.png has the curves.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from sweep import add_flags, load_settings, mean_and_error, run_all

from lightning_jax.engine.score import PromptScorer
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.system.files import replacing, write_whole
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import METRICS, STORE
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import FINISHED, Rollout

CONFIG = str(Path(__file__).parent / "configs" / "openended_cpu.yaml")
AGENTS = Path(__file__).parents[1].resolve() / "agents"
NOTES = "notes.json"  # of a run: its measured notes
NUM_SAMPLES = 3
KL_COEF = 0.1
JUDGE = "{instructions: 'A good note makes sense and is about what was asked.', reasons: false}"
RUBRIC = f"{{rubric: {AGENTS / 'note_rubric.yaml'}, reasons: false}}"
WITHOUT_PROXY = "rewards.similarity.weight=0"
REWARDS: Mapping[str, Sequence[str]] = {
    "proxy": (),
    "proxy_kl": (f"algorithm.kl_coef={KL_COEF}",),
    "judge": (WITHOUT_PROXY, f"rewards.judge={{judge: {JUDGE}}}", "serve.max_len=768"),
    "rubric": (
        WITHOUT_PROXY,
        "rewards.follows.weight=1",
        f"rewards.quality={{judge: {RUBRIC}}}",
        "serve.max_len=512",
    ),
}
SHOWN = ("similarity", "follows", "novelty", "complete")  # components in the curves
BUCKETS = (64, 128, 192, 256)  # lengths that the initial model scores


@dataclass(frozen=True)
class Note:
    """Greedy note for one request, measured."""

    task_id: str
    request: str
    text: str
    components: Mapping[str, float]
    logprob: float  # nats per token under the initial model, mean over the note

    @property
    def held_out(self) -> float:
        """Held-out measure, between 0 and 1."""
        components = self.components
        return statistics.fmean(
            (math.exp(self.logprob), components["novelty"], components["complete"])
        )


@dataclass(frozen=True)
class Result:
    """Notes of one run before and after its training, in the order of the tasks."""

    before: Sequence[Note]
    after: Sequence[Note]

    @property
    def changes(self) -> list[float]:
        """Change of the held-out measure for each request with a note before and after."""
        before = {note.task_id: note.held_out for note in self.before}
        notes = [note for note in self.after if note.task_id in before]
        return [note.held_out - before[note.task_id] for note in notes]


def mean_logprob(
    scorer: PromptScorer, model: LoadedModel, prompt: Sequence[int], note: Sequence[int]
) -> float:
    """Return the mean log-probability of a note's tokens in nats, 0 if it has none."""
    if not note:
        return 0.0
    scores = scorer(model.params, (*prompt, *note)).logprobs
    return math.fsum(scores[len(prompt) - 1 :]) / len(note)


def measure(store: Store, rollouts: Sequence[Rollout], model: LoadedModel) -> list[Note]:
    """Return the notes of finished rollouts, in the order of their tasks' numbers."""
    scorer = PromptScorer(model.config, BUCKETS)
    notes = []
    for rollout in rollouts:
        if rollout.status not in FINISHED or rollout.superseded:
            continue
        calls, _ = spans_to_transitions(store.spans(rollout.rollout_id))
        if not calls:
            continue
        prompt, note = calls[-1].prompt_token_ids, calls[-1].response_token_ids
        notes.append(
            Note(
                rollout.task_id,
                store.task_fields(rollout.rollout_id).get("question", ""),
                model.tokenizer.decode(note).strip(),
                rollout.components,
                mean_logprob(scorer, model, prompt, note),
            )
        )
    return sorted(notes, key=lambda note: int(note.task_id.removeprefix("dev")))


def result_of(directory: Path, config: Config) -> Result:
    """Return the measured notes of a finished run. They are kept in its directory."""
    path = directory / NOTES
    if not path.exists():
        model = load_model(config.model.name)
        with closing(Store(directory / STORE, read_only=True)) as store:
            rollouts = store.rollouts(phase="eval")
            steps = sorted({rollout.step for rollout in rollouts})
            of_steps = [
                measure(store, [r for r in rollouts if r.step == step], model)
                for step in (steps[0], steps[-1])
            ]
        write_whole(path, json.dumps([[asdict(note) for note in notes] for notes in of_steps]))
    before, after = json.loads(path.read_text())
    return Result([Note(**note) for note in before], [Note(**note) for note in after])


def mean_of(notes: Sequence[Note], name: str) -> float:
    """Return the mean of a component, of `logprob` or of `held_out`."""
    if name in ("logprob", "held_out"):
        return statistics.fmean(getattr(note, name) for note in notes)
    return statistics.fmean(note.components[name] for note in notes)


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the Markdown table: means over seeds with standard errors."""
    columns = ("similarity", "follows", "logprob", "novelty", "complete", "held_out")
    lines = [" | ".join(("| reward", *columns, "better, worse |"))]
    lines.append("|---" * (len(columns) + 2) + "|")
    before = next(iter(results.values()))[0].before
    start = [f"{mean_of(before, name):.3f}" for name in columns]
    lines.append(" | ".join(("| before", *start, " |")))
    for name, runs in results.items():
        cells = [mean_and_error([mean_of(r.after, column) for r in runs]) for column in columns]
        changes = [change for result in runs for change in result.changes]
        won, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        lines.append(" | ".join((f"| {name}", *cells, f"{won}, {lost} |")))
    return "\n".join(lines)


def samples(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the notes of the first requests, of the first seed."""
    lines = []
    first = [seeds[0] for seeds in results.values()]
    after = [{note.task_id: note.text for note in result.after} for result in first]
    for note in first[0].before[:NUM_SAMPLES]:
        lines += ["", f"**{note.request}**", "", f"* before: {_line(note.text)}"]
        for name, texts in zip(results, after, strict=True):
            lines.append(f"* {name}: {_line(texts.get(note.task_id, ''))}")
    return "\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def plot(directories: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Write a PNG with the components of each reward's runs, step by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(directories), 3.4), layout="constrained")
    axes = figure.subplots(1, len(directories), sharey=True, squeeze=False).flat
    for axis, (name, runs) in zip(axes, directories.items(), strict=True):
        rows = [
            [row for row in read_metrics(run / METRICS) if "rollout/reward_mean" in row]
            for run in runs
        ]
        for number, component in enumerate(SHOWN):
            curves = [[row[f"reward/{component}_mean"] for row in run] for run in rows]
            means = [statistics.fmean(values) for values in zip(*curves, strict=False)]
            for curve in curves:
                axis.plot(curve, color=f"C{number}", alpha=0.25, linewidth=0.8)
            axis.plot(means, color=f"C{number}", linewidth=2, label=component.replace("_", " "))
        axis.set_title(f"trained on: {name}")
        axis.set_xlabel("step")
        axis.set_ylim(0, 1.02)
    figure.axes[0].set_ylabel("mean of a step's rollouts")
    figure.axes[0].legend(fontsize=8)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--reward", action="append", choices=REWARDS, help="default: all")
    add_flags(parser, num_seeds=1, num_jobs=2)
    args = parser.parse_intermixed_args()
    config = load_settings(args)
    parent = Path(config.run_dir)
    runs = run_all(args, {name: REWARDS[name] for name in args.reward or REWARDS}, parent)
    results = {name: [result_of(run, config) for run in seeds] for name, seeds in runs.items()}
    plot(runs, parent / "openended.png")
    report = f"{table(results)}\n{samples(results)}\n"
    write_whole(parent / "report.md", report)
    print(report)
    print(f"curves: {parent / 'openended.png'}")


if __name__ == "__main__":
    main()
