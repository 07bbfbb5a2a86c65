"""Adapter that lets JetStream's unmodified Driver run our engine.

JetStream's requests have no field for some of our data, so it travels inside values that the Driver
passes on untouched: sampling settings in the prompt string, log-probabilities in the token ids.
JetStream was archived at 0.2.2 and is installed without its dependencies. `_importing_jetstream`
works around both.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int32

from lightning_jax.engine.device.programs import DecodeState
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.generation import EngineError
from lightning_jax.engine.types import SamplingParams
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import is_installed

log = logging.getLogger(__name__)


@contextmanager
def _importing_jetstream() -> Iterator[None]:
    """Import the orchestrator without its side effects, and stub out seqio.

    The import sets the root logger to DEBUG with a handler on stdout. It also needs two class names
    of seqio, whose dependencies include TensorFlow.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    stand_ins = {} if is_installed("seqio") else _seqio_stand_in()
    sys.modules.update(stand_ins)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        raise ConfigError.not_installed(
            "serve.orchestrator",
            f"serve.orchestrator is jetstream, but {error.name} is not installed; run pip install "
            "'lightning-jax[jetstream]' and pip install --no-deps google-jetstream==0.2.2",
        ) from error
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for name in stand_ins:
            del sys.modules[name]


def _seqio_stand_in() -> dict[str, ModuleType]:
    package, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
    names = {name: type(name, (), {}) for name in ("Vocabulary", "SentencePieceVocabulary")}
    vars(vocabularies).update(names)
    vars(package).update(vocabularies=vocabularies)
    return {"seqio": package, "seqio.vocabularies": vocabularies}


with _importing_jetstream():
    from jetstream.core import orchestrator
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2


# A prompt has no arrays, and the original calls jax.tree_map, which no longer exists.
orchestrator.delete_pytree = lambda tree: None


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and the sampling settings of its response."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


class PromptText(str):
    """String that carries a prompt through the Driver to the tokenizer."""

    prompt: Prompt


class RecordedToken(int):
    """Token id with its log-probabilities."""

    behavior_logprob: float
    sampling_logprob: float
    tempered_logprob: float

    def item(self) -> "RecordedToken":
        """Return itself. The Driver calls this on array elements."""
        return self


@struct.dataclass
class RecordedTokens(engine_api.ResultTokens):
    """Result of a step.

    Columns of `data`: token, valid, length, then bits of the log-probabilities.
    """

    def convert_to_numpy(self) -> "RecordedTokens":
        """Return a copy on the host. Waits for the step."""
        return recorded_tokens(np.asarray(self.data))

    def get_result_at_slot(self, slot: int) -> engine_api.SlotData:
        """Return the slot's single RecordedToken. Call after `convert_to_numpy`."""
        row = np.asarray(self.data)[slot]
        token = RecordedToken(row[0])
        logprobs = row[3:6].view(np.float32).tolist()
        token.behavior_logprob, token.sampling_logprob, token.tempered_logprob = logprobs
        tokens = np.empty((1, 1), object)
        tokens[0, 0] = token
        return engine_api.SlotData(tokens=tokens, valid=row[None, 1:2], lengths=row[2:3])


def recorded_tokens(columns: Any) -> RecordedTokens:
    """Wrap an int32 array of shape [S, 6]."""
    return RecordedTokens(
        data=columns, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
    )


@jax.jit
def _columns(sampled: Int32[Array, "4 S"], counts: Int32[Array, " S"]) -> Int32[Array, "S 6"]:
    tokens, *logprobs = sampled
    return jnp.stack((tokens, jnp.ones_like(tokens), counts, *logprobs), axis=1)


class _PromptTokenizer(tokenizer_api.Tokenizer):
    """Tokenizer that passes prompts through. Decoding and stop tokens are handled elsewhere."""

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return -1

    @property
    def bos_id(self) -> int:
        return -1

    @property
    def stop_tokens(self) -> set[int]:
        return set()

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        assert isinstance(s, PromptText), "JetStreamLoop makes the requests"
        return s.prompt, len(s.prompt.ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return ""


def _spares_the_process(method: Any) -> Any:
    """Turn an Exception into SystemExit, which ends the thread.

    The Driver would kill the process.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            log.exception("the engine failed in JetStream's Driver")
            words = f"the engine failed: {error!r}. See the log, then restart."
            self.on_failure(EngineError(words, reason="failed"))
            raise SystemExit from error

    return guarded


class JetStreamEngine(engine_api.Engine):
    """Our programs behind JetStream's interface.

    A prompt is computed by `insert`, when its slot is known, and straight in the slot's row.
    """

    def __init__(self, programs: SlotPrograms, params: Any) -> None:
        self._programs, self._params = programs, params
        self._table = SlotTable(programs.num_slots)
        self.on_failure = lambda error: None

    def prefill(self, *, padded_tokens: Any, **kwargs: Any) -> Prompt:
        return padded_tokens

    @_spares_the_process
    def insert(self, prefix: Prompt, decode_state: DecodeState, slot: int) -> DecodeState:
        *context, last = prefix.ids
        fill = Fill(slot, 0, context)
        cache = self._programs.prefill(self._params, decode_state.cache, [fill])
        self._table.begin(slot, last, len(context), prefix.sampling, prefix.seed)
        return replace(decode_state, cache=cache)

    @_spares_the_process
    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, RecordedTokens]:
        slots = range(self._programs.num_slots)  # the Driver does not say which are in use
        state, sampled = self._programs.generate(params, decode_state, self._table, slots)
        return state, recorded_tokens(_columns(sampled, self._table.counts()))

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        return self._params

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        return self._programs.init_state()

    def get_prefix_destination_sharding(self) -> Any:
        return None  # prefill and decode share the devices

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters()  # type: ignore[attr-defined]

    def build_tokenizer(self, metadata: Any) -> _PromptTokenizer:
        return _PromptTokenizer()

    @property
    def max_concurrent_decodes(self) -> int:
        return self._programs.num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._programs.max_len

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._programs.mesh or jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    @property
    def colocated_cpus(self) -> None:
        return None
