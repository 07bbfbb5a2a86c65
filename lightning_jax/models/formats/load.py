"""Model loading by name: a Hugging Face directory or hub id, or a GGUF file.

The names `smollm2-135m-instruct` and `tiny` also work. The latter is a random model.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from lightning_jax.models import chat_template as templates
from lightning_jax.models.config import ModelConfig
from lightning_jax.models.families.table import FAMILIES, SHAPES
from lightning_jax.models.formats import gguf, gguf_vocab, huggingface
from lightning_jax.models.formats.find import find_model, tiny_shape, tiny_tokenizer
from lightning_jax.models.formats.gguf_file import open_file
from lightning_jax.models.formats.param_names import ParamPath, Put, flatten, keep, unflatten
from lightning_jax.models.model_files import TINY, ModelError, read_chat_template
from lightning_jax.models.shape import DecoderConfig, DecoderShape, Execution
from lightning_jax.models.tokenizer import Tokenizer, from_hf
from lightning_jax.models.transformer import Params, init_params

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Weights with the config and tokenizer needed to use them."""

    name: str
    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ModelReader:
    """Model whose config and tokenizer are loaded, and whose weights `params` reads when called."""

    name: str
    config: DecoderConfig
    tokenizer: Tokenizer
    params: Callable[[Put], Params]
    path: Path | None = None

    def load(self, shardings: Params | None = None) -> LoadedModel:
        """Read the weights into host memory, because one device may be too small for them.

        With a tree of shardings on devices of this process, each weight goes to its shards as soon
        as it is read, so that the host never holds the whole model.
        """
        started = time.monotonic()
        with _on_host():
            put = keep if shardings is None else _to_shards(flatten(shardings))
            params = jax.block_until_ready(self.params(put))
        if self.path is not None:
            seconds = time.monotonic() - started
            logger.info("loaded %s from %s in %.1f s", self.name, self.path, seconds)
        return LoadedModel(self.name, self.config, params, self.tokenizer)


def _to_shards(shardings: Mapping[ParamPath, Sharding]) -> Put:
    def put(path: ParamPath, leaf: jax.Array) -> jax.Array:
        # Waits, so that weights do not collect on the host while they travel.
        return jax.block_until_ready(jax.device_put(leaf, shardings[path]))

    return put


def open_model(
    name: str,
    dtype: str = "float32",
    activation_dtype: str | None = None,
    *,
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tool_format: str | None = None,
) -> ModelReader:
    """Open the named model, whose weights are read in `dtype`.

    `activation_dtype` is set in the model's config. `chat_template` is a file to use instead of
    the model's own template, and `chat_template_kwargs` has values for the template's variables.
    `tool_format` names the format of its tool calls, by default that of its family or template.
    Raises ModelError, whose one sentence says what to do.
    """
    execution = Execution(activation_dtype=activation_dtype)
    with_chat = partial(_with_chat, file=chat_template, kwargs=chat_template_kwargs or {})
    if name == TINY:
        config = DecoderConfig(tiny_shape(), execution)
        vocabulary = with_chat(tiny_tokenizer(), tool_format=tool_format)
        return ModelReader(name, config, vocabulary, partial(_random_params, config, dtype))
    path = find_model(name)
    if path.is_dir():
        shape, vocabulary = huggingface.untie(path, huggingface.read_shape(path)), from_hf(path)
        read_params = partial(huggingface.read_params, path, shape, dtype)
    else:
        file = open_file(path)
        shape, vocabulary = gguf.read_shape(file), gguf_vocab.read_tokenizer(file)
        read_params = partial(gguf.read_params, file, shape, dtype)
    tool_format = tool_format or FAMILIES[shape.family].tool_format
    vocabulary = with_chat(vocabulary, tool_format=tool_format)
    check_vocabulary(vocabulary, shape.vocab_size, path)
    return ModelReader(name, DecoderConfig(shape, execution), vocabulary, read_params, path)


def _random_params(config: DecoderConfig, dtype: str, put: Put) -> Params:
    leaves = flatten(init_params(config, jax.random.key(0), dtype))
    return unflatten({path: put(path, leaf) for path, leaf in leaves.items()})


def load_model(
    name: str,
    dtype: str = "float32",
    activation_dtype: str | None = None,
    *,
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tool_format: str | None = None,
) -> LoadedModel:
    """Load the named model into host memory. See `open_model`."""
    model = open_model(
        name,
        dtype,
        activation_dtype,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        tool_format=tool_format,
    )
    return model.load()


def check_vocabulary(vocabulary: Tokenizer, num_rows: int, path: Path) -> None:
    """Raise ModelError if a token has no row in the embedding. Log an end that no file names."""
    beyond = sorted((i, token) for token, i in vocabulary.vocabulary.items() if i >= num_rows)
    if beyond:
        (first, token), (last, _) = beyond[0], beyond[-1]
        raise ModelError.mismatch(
            token,
            f"the tokenizer of {path} has {len(beyond)} tokens beyond the {num_rows} rows of the "
            f"embedding, from {token!r} (id {first}) on; call the model's "
            f"resize_token_embeddings({last + 1}) in transformers and save it, or remove these "
            "tokens from the tokenizer's files",
        )
    if unnamed := vocabulary.eos_ids - vocabulary.named_eos_ids:
        logger.info(
            "the chat template ends turns with %s, which the files of %s do not name as an end of "
            "response (eos_token); it ends responses too",
            ", ".join(vocabulary.pieces.name(i) for i in unnamed),
            path,
        )


def open_configured(settings: ModelConfig) -> ModelReader:
    """Open the model that the settings name, with their dtypes and chat template.

    Adapters are not added. See `open_model`.
    """
    model = open_model(
        settings.name,
        settings.dtype,
        settings.activation_dtype,
        chat_template=settings.chat_template,
        chat_template_kwargs=settings.chat_template_kwargs,
        tool_format=settings.tool_format,
    )
    config = model.config.with_execution(trains_router=settings.train_router)
    return replace(model, config=config)


def load_configured(settings: ModelConfig) -> LoadedModel:
    """Load the model that the settings name into host memory. See `open_configured`."""
    return open_configured(settings).load()


def _with_chat(
    vocabulary: Tokenizer,
    *,
    file: str | Path | None,
    kwargs: Mapping[str, Any],
    tool_format: str | None,
) -> Tokenizer:
    """Return the tokenizer with the template, its variables and the tool format of the settings.

    Raises ModelError if the file or a variable cannot be used.
    """
    if tool_format is not None:
        vocabulary = vocabulary.with_chat(tool_format=tool_format)
    template, for_tools = vocabulary.template, vocabulary.tool_template
    if file is not None:
        template, for_tools = read_chat_template(file), None
    if template is None and kwargs:
        raise ModelError.missing(
            "model.chat_template",
            "model.chat_template_kwargs is set, but the model has no chat template; set "
            "model.chat_template to a file",
        )
    if template is None or (file is None and not kwargs):
        return vocabulary
    try:
        return vocabulary.with_chat(
            template=templates.with_defaults(template, kwargs),
            tool_template=for_tools and templates.with_defaults(for_tools, kwargs),
        )
    except templates.TemplateError as error:
        key = "model.chat_template" if error.key is None else "model.chat_template_kwargs"
        raise ModelError(f"{key}: {error}", reason=error.reason, key=key) from error


def load_like(model: LoadedModel, name: str) -> LoadedModel:
    """Load the named model in the dtype of `model`'s weights, with `model`'s chat template.

    Raises ModelError if its shape or vocabulary differs from `model`'s.
    """
    dtype = model.params["embed"]["embedding"].dtype
    return as_policy_beside(
        model, load_model(name, str(dtype), model.config.execution.activation_dtype)
    )


def as_policy_beside(model: LoadedModel, other: LoadedModel) -> LoadedModel:
    """Return `other` with `model`'s tokenizer, as another policy of the same run.

    Raises ModelError if its shape or vocabulary differs from `model`'s.
    """
    execution = model.config.execution
    config = other.config.with_execution(trains_router=execution.trains_router)
    other, same_shape = replace(other, config=config), config == model.config
    if not same_shape or other.tokenizer.vocabulary != model.tokenizer.vocabulary:
        raise ModelError.mismatch(
            "vocabulary" if same_shape else "shape",
            f"model {other.name!r} has another {'vocabulary' if same_shape else 'shape'} than "
            f"{model.name!r}, but both are policies of one run; use a model trained from "
            f"{model.name!r}",
        )
    return replace(other, tokenizer=model.tokenizer)


def load_shape(name: str) -> DecoderShape:
    """Load the shape of the named model, without its weights. Raises ModelError."""
    if name == TINY:
        return tiny_shape()
    if name in SHAPES:
        return SHAPES[name]
    path = find_model(name)
    if path.is_dir():
        return huggingface.read_shape(path)
    return gguf.read_shape(open_file(path))


def _on_host() -> contextlib.AbstractContextManager[None]:
    """Return a context in which new arrays go to the host, unless JAX has no CPU backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def save_hf(directory: Path | str, model: LoadedModel) -> None:
    """Atomically write a directory that `load_model` and transformers load.

    Earlier contents of `directory` are replaced.
    """
    with whole_directory(Path(directory)) as draft:
        assert model.config.execution.lora is None, "adapters are merged first, or would be lost"
        huggingface.write_model(draft, model.config.shape, model.params, model.tokenizer.eos_ids)
        model.tokenizer.save(draft)


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory to fill, which replaces `target` at the end unless an error occurs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(draft, target)
            shutil.rmtree(old)
        else:
            os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
