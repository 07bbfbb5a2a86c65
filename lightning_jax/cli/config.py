"""Settings of `lightning-jax serve`."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import ModelConfig
from lightning_jax.schema import Count, NonNegative, Rule, Section, section


@section
class ServerConfig(Section):
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None
    """SQLite file that records every call; None: do not record."""
    drain_s: NonNegative = 30.0
    """Time that running requests have to finish at shutdown."""
    tensor: Count = 1
    """GPUs or TPUs per copy of the model; the others hold more copies."""

    def rules(self) -> Iterator[Rule]:
        yield "record", self.record != "", "expected the name of a file"


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set the model's chat template and its variables."""
    template = "Jinja file to use instead of the model's own chat template"
    parser.add_argument("--chat-template", metavar="FILE", help=template)
    values = """the template's variables, such as '{"enable_thinking": false}'"""
    flag = "--chat-template-kwargs"
    parser.add_argument(flag, metavar="JSON", type=_json_object, default={}, help=values)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found
