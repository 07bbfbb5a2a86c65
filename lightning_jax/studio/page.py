"""Rendering of a view as one HTML page without network access or scripts. Pure functions."""

import functools
import math
from collections.abc import Sequence

import jinja2

from lightning_jax.studio.records import RolloutView, RunView, SpanView, TokenView
from lightning_jax.studio.terminal import facts
from lightning_jax.studio.text import cut

MAX_CHARS = 20_000  # per text
MAX_ATTRIBUTE_CHARS = 500
MAX_TOKENS = 5_000  # per response
MAX_SPANS = 500  # per rollout


def render_page(run: RunView | None, rollouts: Sequence[RolloutView]) -> str:
    """Render these rollouts as a page, below the table of the run if there is one."""
    name = run.name if run else rollouts[0].rollout.rollout_id
    return _template().render(run=run, rollouts=rollouts, title=f"{name} - lightning-jax")


@functools.cache
def _template() -> jinja2.Template:
    """Return the page's template. It escapes all values."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lightning_jax.studio", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cut": functools.partial(cut, limit=MAX_CHARS),
        "cut_attribute": functools.partial(cut, limit=MAX_ATTRIBUTE_CHARS),
        "facts": facts,
        "percent": _percent,
        "sign": _sign,
        "surprise": _surprise,
    }
    environment.globals |= {"max_tokens": MAX_TOKENS, "max_spans": MAX_SPANS}
    return environment.get_template("page.html.jinja")


def _percent(seconds: float, whole_s: float) -> str:
    """Return the share of the rollout's time, for CSS."""
    return f"{100 * min(max(seconds / whole_s, 0.0), 1.0) if whole_s > 0 else 0.0:.3f}%"


def _sign(span: SpanView) -> str:
    """Return a CSS name for the sign of the call's advantage."""
    credit = span.call.credit if span.call else None
    if credit is None or credit.advantage == 0:
        return "none"
    return "plus" if credit.advantage > 0 else "minus"


def _surprise(token: TokenView) -> str:
    """Return one minus the token's probability, for CSS."""
    return "0" if token.logprob is None else f"{1 - math.exp(min(token.logprob, 0.0)):.2f}"
