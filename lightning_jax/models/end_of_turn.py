"""Token with which a chat template ends the assistant's turn, found by rendering one."""

import re
from collections.abc import Mapping

from lightning_jax.models.chat_template import TemplateError, render

_MARK = "@@answer-7d1f@@"  # no template writes this itself
_TURNS = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": _MARK})


def end_of_turn(
    template: str, special_tokens: Mapping[str, str], added: Mapping[str, int]
) -> int | None:
    """Return the id of the added token after the assistant's text, or None if there is none.

    Base models with a chat template often name only the end of a document as their end.
    """
    try:
        text = render(template, _TURNS, add_generation_prompt=False, special_tokens=special_tokens)
    except TemplateError:
        return None
    _, mark, after = text.rpartition(_MARK)
    if not mark or not added:
        return None
    longest_first = sorted(added, key=len, reverse=True)
    found = re.match(rf"\s*({'|'.join(map(re.escape, longest_first))})", after)
    begins, ends = (special_tokens.get(name) for name in ("bos_token", "eos_token"))
    if found is None or found[1] == begins != ends:
        return None
    return added[found[1]]
