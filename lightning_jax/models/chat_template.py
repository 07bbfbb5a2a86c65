"""Chat templates: a list of messages to the text that a model was trained on."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes

from lightning_jax.models.template_limits import LimitedEnvironment, start
from lightning_jax.types import InvalidValue, Message


class TemplateError(InvalidValue):
    """The template refuses these messages; the text says why."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks a model's own words in some templates; the text inside is kept."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """The prompt text. `special_tokens` are names such as `bos_token` that a template may write.

    The template comes with the weights, so it runs in a sandbox with limits. Raises TemplateError,
    whatever the template raises.
    """
    try:
        start()
        compiled = _compiled(template)
        return compiled.environment.render(  # type: ignore[attr-defined]
            compiled,
            messages=list(messages),
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(special_tokens or {}),
        )
    except Exception as error:
        words = str(error)[:500] if isinstance(error, jinja2.TemplateError) else repr(error)[:500]
        raise TemplateError(
            f"the chat template rejects these {len(messages)} messages ({words}); expected the "
            "roles and text contents it was written for. Change the messages.",
            reason="rejected",
        ) from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    # The whitespace settings, filters and globals that published templates are written against.
    environment = LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.limit({"tojson": _to_json})
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, and would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
