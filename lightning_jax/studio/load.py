"""Reader of a run directory for views: its store, settings and tokenizer.

Nothing is written, and the run may continue meanwhile. Nothing here imports JAX, which takes
seconds.
"""

import contextlib
import difflib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lightning_jax.errors import UserError
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.policies import PolicyTable
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.studio import DEFAULT_LIMIT
from lightning_jax.studio.build import newest_first, view_rollout, view_run
from lightning_jax.studio.credit import step_credit, trained_on
from lightning_jax.studio.records import RolloutView, RunView, StepCredit
from lightning_jax.system.text import printable
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store, StoreError
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.traces.tree import attach_loose_calls
from lightning_jax.train.config import Config
from lightning_jax.train.directory import SETTINGS, STORE, require_run
from lightning_jax.types import Rollout, Span

EVALUATION = "an evaluation is not trained on, so it has no credit"


class ViewError(UserError, ValueError):
    """Request for a view that has nothing to show. The message gives the reason."""


@contextlib.contextmanager
def open_run(directory: Path) -> Iterator["RunReader"]:
    """Open the run in that directory, or the store of `try --record`.

    Raises ConfigError or StoreError if there is none.
    """
    if directory.is_file():
        with contextlib.closing(Store(directory, read_only=True)) as store:
            yield RunReader(directory.parent, store, settings=recorded_settings(directory))
        return
    require_run(directory, STORE)
    with contextlib.closing(Store(directory / STORE, read_only=True)) as store:
        yield RunReader(directory, store)


def recorded_settings(store: Path) -> Path:
    """Return the file of the settings with which the rollouts of `try --record` ran."""
    return store.with_name(f"{store.name}.yaml")


class RunReader:
    """Open run. A view has a note for anything that cannot be read.

    Settings and tokenizer are by default read from the file `settings`, which is by default the
    directory's. Without `has_credit`, views show no credit and no reason for that.
    """

    def __init__(
        self,
        directory: Path,
        store: Store,
        *,
        settings: Path | None = None,
        config: Config | None = None,
        tokenizer: Tokenizer | None = None,
        has_credit: bool = True,
    ) -> None:
        self._has_credit = has_credit
        self._directory = directory
        self._settings = settings or directory / SETTINGS
        self._store = store
        self._given_config, self._given_tokenizer = config, tokenizer
        self._credit_of_steps: dict[int, tuple[set[str], StepCredit]] = {}

    def run(
        self, *, phase: str | None = None, step: int | None = None, limit: int = DEFAULT_LIMIT
    ) -> RunView:
        """Return the table of the newest rollouts that match. Raises ViewError if none does."""
        matching = newest_first(self._store.rollouts(phase=phase, step=step))
        if not matching:
            raise self._nothing_matches(phase, step)
        ids = [rollout.rollout_id for rollout in matching[:limit]]
        in_table = list(zip(matching, map(self._store.spans, ids), strict=False))
        tasks = {rollout_id: self._store.task_fields(rollout_id) for rollout_id in ids}
        return view_run(str(self._directory), matching, in_table, tasks)

    def rollout(self, rollout_id: str) -> RolloutView:
        """Return one rollout with its calls. Raises ViewError for an unknown id."""
        rollout = self._find(rollout_id)
        spans = attach_loose_calls(self._store.spans(rollout_id))
        has_tokens = any(attributes.PROMPT_TOKEN_IDS in span.attributes for span in spans)
        tokenizer, why_no_text = self.tokenizer if has_tokens else (None, "")
        credit = self._credit(rollout)
        if why_no_text:
            credit = replace(credit, notes=(why_no_text, *credit.notes))
        transitions, _, _ = self._trace_reader.transitions(spans)
        task = self._store.task_fields(rollout_id)
        view = view_rollout(rollout, spans, transitions, tokenizer, credit, task)
        reasons = self._store.reasons(rollout_id).items()
        return replace(view, reasons=tuple((name, printable(text)) for name, text in reasons))

    def spans(self, rollout_id: str) -> list[Span]:
        """Return the recorded spans of a rollout in the order of their start."""
        return self._store.spans(rollout_id)

    def forget_credit(self) -> None:
        """Compute credit again where it is shown next, because rollouts have ended since."""
        self._credit_of_steps.clear()

    def _find(self, rollout_id: str) -> Rollout:
        with contextlib.suppress(StoreError):
            return self._store.rollout(rollout_id)
        ids = [rollout.rollout_id for rollout in self._store.rollouts()]
        close = difflib.get_close_matches(rollout_id, ids, n=3, cutoff=0.5)
        hint = f"the closest are {', '.join(close)}" if close else "omit it for a list"
        raise ViewError(
            f"{self._directory} has no rollout {rollout_id!r}; {hint}.",
            reason="unknown_rollout",
            key=rollout_id,
        )

    def _nothing_matches(self, phase: str | None, step: int | None) -> ViewError:
        everything = self._store.rollouts()
        if not everything:
            return ViewError.empty(
                str(self._directory),
                f"{self._directory} has no rollouts yet; wait for the first step.",
            )
        query = [f"phase {phase}"] * (phase is not None) + [f"step {step}"] * (step is not None)
        steps = [rollout.step for rollout in everything]
        return ViewError(
            f"none of the {len(everything)} rollouts of {self._directory} has "
            f"{' and '.join(query)}; expected train or eval and a step of {min(steps)} to "
            f"{max(steps)} in which there were some.",
            reason="nothing_matches",
        )

    # Other inputs of a rollout's view

    @functools.cached_property
    def tokenizer(self) -> tuple[Tokenizer | None, str]:
        """Pair of the tokenizer of the run's model, or None, and the reason if there is none."""
        if self._given_tokenizer is not None:
            return self._given_tokenizer, ""
        # Imports packages of model formats, which the table does not need.
        from lightning_jax.models.formats.find import load_tokenizer

        try:
            config = load_config(Config, [str(self._settings)], only=["model"])
            return load_tokenizer(config.model.name), ""
        except (ConfigError, ModelError) as error:
            why = f"texts of prompts and responses are unavailable: {error}"
        # A relative model path fails from another directory. A finished run exported its tokenizer.
        for exported in (self._directory / "policy").rglob("tokenizer.json"):
            with contextlib.suppress(ModelError):
                return load_tokenizer(str(exported.parent)), ""
        return None, why

    @functools.cached_property
    def _config(self) -> tuple[Config | None, str]:
        """Pair of the settings that shape credit, or None, and the reason if it is None."""
        if self._given_config is not None:
            return self._given_config, ""
        sections = ["algorithm", "model", "policies", "roles", "reward_rules"]
        try:
            config = load_config(Config, [str(self._settings)], only=sections)
        except ConfigError as error:
            return None, f"no credit or advantages: {error}"
        if config.reward_rules and self.tokenizer[0] is None:
            return None, "no credit or advantages: the reward rules need the text of the calls"
        return config, ""

    @functools.cached_property
    def _trace_reader(self) -> TraceReader:
        config = self._config[0]
        if config is None:
            return TraceReader()
        if not config.reward_rules:  # nothing else needs the tokenizer
            return TraceReader(config.roles, policies=config.policy_table)
        tokenizer = self.tokenizer[0]
        assert tokenizer is not None, "_config has checked it"
        return TraceReader(config.roles, config.reward_rules, tokenizer.decode, config.policy_table)

    def _credit(self, rollout: Rollout) -> StepCredit:
        """Return the credit of the calls of the rollout's step, or a note if there is none."""
        config, why_not = self._config
        if not self._has_credit:
            return StepCredit()
        if rollout.phase != "train":
            return StepCredit(notes=(EVALUATION,))
        if rollout.reward is None:
            return StepCredit(
                notes=(f"no credit: the rollout has no reward, as its status is {rollout.status}",)
            )
        if config is None:
            return StepCredit(notes=(why_not,))
        step = self._store.step_of_group(rollout.group_id)
        if step is None:
            step = rollout.step  # it is running, or older than the record of groups
            if self._store.step_groups(step):
                return StepCredit(notes=("no step has trained on its group yet",))
        if step not in self._credit_of_steps:
            self._credit_of_steps[step] = self._of_step(step, config.algorithm, config.policy_table)
        trained, credit = self._credit_of_steps[step]
        if rollout.rollout_id not in trained:
            return StepCredit(notes=("not trained on: another attempt replaced it",))
        return credit

    def _of_step(
        self, step: int, algorithm: AlgorithmConfig, policies: PolicyTable
    ) -> tuple[set[str], StepCredit]:
        """Return the ids of the rollouts that a step trained on, and the credit of their calls."""
        names = self._store.step_groups(step)
        of_groups = [rollout for name in names for rollout in self._store.rollouts(group_id=name)]
        rollouts = trained_on(of_groups or self._store.rollouts(phase="train", step=step))
        ids = {rollout.rollout_id for rollout in rollouts}
        trajectories = self._trace_reader.read(self._store, rollouts).trained
        credit = step_credit(trajectories, algorithm, step=step, policies=policies)
        num_open = sum(rollout.status in ("queued", "running") for rollout in rollouts)
        if num_open == 0:
            return ids, credit
        waiting = (
            f"step {step} is still running: advantages exclude {num_open} of its {len(rollouts)} "
            "rollouts"
        )
        return ids, replace(credit, notes=(*credit.notes, waiting))
