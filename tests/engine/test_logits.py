"""Tests of logit changes against numbers worked by hand."""

import numpy as np
import pytest

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.engine.grammar.process import wait_readable
from lightning_jax.engine.logits import LogitAdjuster, moves_logits, only_masks
from lightning_jax.engine.types import SamplingParams
from lightning_jax.testing.tiny import tiny_tokenizer


def row_of(adjuster: LogitAdjuster) -> list[float]:
    row = np.zeros(adjuster.vocab_size, np.float32)
    adjuster.add_to(row)
    return row.tolist()


def test_bias_and_penalties_add_up():
    sampling = SamplingParams(
        logit_bias=((0, 2.0), (3, -100.0), (0, 0.5)), presence_penalty=0.25, frequency_penalty=0.5
    )
    adjuster = LogitAdjuster(sampling, 5)
    assert row_of(adjuster) == [2.5, 0, 0, -100, 0] and adjuster.has_bias and adjuster.is_ready
    for token_id in (4, 0, 4):
        adjuster.push(token_id)
    # Token 0 once: 2.5 - 0.5 - 0.25. Token 4 twice: -2 * 0.5 - 0.25.
    assert row_of(adjuster) == [1.75, 0, 0, -100, -1.25]
    assert not adjuster.forced


def test_a_mask_comes_apart_from_the_bias_and_after_each_token():
    tokenizer = tiny_tokenizer()
    a, b, c = tokenizer.encode("abc")
    sampling = SamplingParams(logit_bias=((b, 100.0), (a, 1.0)), grammar='start: "a" ("b" | "c")')
    adjuster = LogitAdjuster(sampling, 259)
    adjuster.begin(GrammarCompiler(tokenizer))
    assert adjuster.matcher
    for allowed, token_id in (({a}, a), ({b, c}, c)):
        assert not adjuster.is_ready
        while not adjuster.is_ready:
            wait_readable([adjuster.matcher.fileno()], 1.0)
            adjuster.poll()
        row = row_of(adjuster)
        assert (row[a], row[b], np.isfinite(row).all()) == (1.0, 100.0, True)
        bits = np.unpackbits(adjuster.matcher.packed(), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == allowed
        assert adjuster.forced == (len(allowed) == 1)
        adjuster.push(token_id)
    adjuster.end()


@pytest.mark.parametrize(
    ("settings", "depends", "biased"),
    [
        ({"logit_bias": ((1, 0.5),)}, False, (True, True)),
        ({"presence_penalty": -1.0}, True, (False, True)),
        ({"frequency_penalty": 1.0}, True, (False, True)),
        ({"grammar": 'start: "a"'}, True, (False, False)),
    ],
)
def test_a_request_waits_for_its_tokens_only_if_they_change_what_is_next(settings, depends, biased):
    adjuster = LogitAdjuster(SamplingParams(**settings), 259)
    before = adjuster.has_bias
    adjuster.push(3)
    assert (adjuster.depends_on_tokens, (before, adjuster.has_bias)) == (depends, biased)


@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_k": 5, "stop": ("x",), "seed": 1}, False),
        ({"logit_bias": ((1, 0.0),)}, True),
        ({"presence_penalty": -1.0}, True),
        ({"frequency_penalty": 1.0}, True),
        ({"top_logprobs": 1}, False),
        ({"grammar": 'start: "a"'}, True),
    ],
)
def test_plain_requests_sample_from_the_policys_own_logits(settings, moves):
    assert moves_logits(SamplingParams(**settings)) is moves


@pytest.mark.parametrize(
    ("settings", "masks"),
    [
        ({}, True),
        ({"temperature": 0.5, "top_logprobs": 2}, True),
        ({"temperature": 0.0}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 3}, False),
        ({"min_p": 0.1}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"presence_penalty": 1.0}, False),
        ({"grammar": None}, False),
    ],
)
def test_a_grammar_alone_shapes_samples_unless_something_else_does(settings, masks):
    assert only_masks(SamplingParams(**{"grammar": 'start: "a"'} | settings)) is masks
