"""Chat templates, which turn a list of messages into the text format a model was trained on."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes

from lightning_jax.errors import InvalidValue
from lightning_jax.models.template_limits import RENDERED, LimitedEnvironment, start_clock
from lightning_jax.types import Message

_MARK = "@@answer-7d1f@@"  # no template writes this itself
_TURNS = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": _MARK})


class TemplateError(InvalidValue):
    """Error raised when a template rejects messages; its text gives the reason."""


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %}`, which marks the model's own words in some templates.

    The text inside is kept.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt text.

    `special_tokens` maps names such as `bos_token`, which a template may use, to texts. `kwargs`
    are other variables, within the limits of `check_kwargs`. The template comes with the weights,
    so it runs in a sandbox with limits. Raises TemplateError for any error in the template.
    """
    variables = {
        "documents": None,
        **(special_tokens or {}),
        **(kwargs or {}),
        "messages": list(messages),
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        start_clock()
        compiled = _compiled(template)
        return compiled.environment.render(compiled, variables)  # type: ignore[attr-defined]
    except Exception as error:
        others = " and chat_template_kwargs" if kwargs else ""
        raise TemplateError(
            f"the chat template rejects these {len(messages)} messages{others} ({_words(error)}); "
            "send what it supports",
            reason="rejected",
        ) from error


def with_defaults(template: str, kwargs: Mapping[str, Any]) -> str:
    """Return the template with values for variables that a rendering does not set.

    They are part of the template's text, so that other programs that load it use them too. Raises
    TemplateError if the template cannot be parsed or never reads one of the variables.
    """
    try:
        start_clock()
        environment = _compiled(template).environment
        variables = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except Exception as error:
        raise TemplateError(
            f"the chat template cannot be parsed ({_words(error)}); correct it", reason="malformed"
        ) from error
    for name in kwargs:
        if name not in variables:
            raise TemplateError(
                f"the chat template never reads {name!r} of chat_template_kwargs; it reads "
                f"{', '.join(sorted(variables - {*RENDERED})) or 'no such variable'}",
                reason="unread",
                key=name,
            )
    # JSON values are written alike in Python and in Jinja. The line break ends with its block.
    lines = (
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        for name, value in kwargs.items()
    )
    return "".join(lines) + template


def _words(error: Exception) -> str:
    return (str(error) if isinstance(error, jinja2.TemplateError) else repr(error))[:500]


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    # Published templates expect these whitespace settings, filters and globals.
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
    # jinja2's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def end_of_turn(
    template: str, special_tokens: Mapping[str, str], added: Mapping[str, int]
) -> int | None:
    """Return the id of the added token after the assistant's text, or None if there is none.

    Base models with a chat template often name only the end of a document as their end.
    """
    try:
        text = render_template(
            template, _TURNS, add_generation_prompt=False, special_tokens=special_tokens
        )
    except TemplateError:
        return None
    _, mark, after = text.rpartition(_MARK)
    if not mark or not added:
        return None
    longest_first = sorted(added, key=len, reverse=True)
    match = re.match(rf"\s*({'|'.join(map(re.escape, longest_first))})", after)
    begins, ends = (special_tokens.get(name) for name in ("bos_token", "eos_token"))
    if match is None or match[1] == begins != ends:
        return None
    return added[match[1]]
