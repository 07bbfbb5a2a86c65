"""Agents of docs/frameworks/, as their pages have them.

A rollout's URL (without /v1) is in LIGHTNING_ROLLOUT, the key in LIGHTNING_KEY. smolagents is left
out, because its prompt is longer than the tiny model reads. CrewAI needs another openai.
"""

import asyncio
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.clients

PAGES = Path(__file__).parents[2] / "docs/frameworks"
LLM = SimpleNamespace(
    base_url=f"{os.environ.get('LIGHTNING_ROLLOUT', '')}/v1",
    api_key=os.environ.get("LIGHTNING_KEY", ""),
    model="policy",
)


@pytest.mark.parametrize("page", ["autogen", "dspy", "openai_agents"])
def test_page_has_an_agent_that_earns_a_reward(page: str) -> None:
    found = re.search(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    assert found is not None
    names: dict = {"__name__": page}
    exec(compile(found[1], f"{page}.md", "exec"), names)
    result = names["run"]({"text": "July 4, 1976", "date": "1976-07-04"}, LLM)
    reward = asyncio.run(result) if inspect.iscoroutine(result) else result
    assert 0.0 <= reward <= 1.0
