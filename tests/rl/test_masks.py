"""Tests of grammar masks in training."""

import dataclasses
import math

import pytest

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.masks import mask_metrics
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.testing.records import sequence, trajectory, transition


def test_tokens_whose_distribution_lost_a_tenth_of_its_mass_are_counted() -> None:
    """A mask took 0, 5, 20 and 60 % of the mass of four trained tokens; a fifth was forced."""
    call = transition([1], [2, 3, 4, 5, 6], forced=(False,) * 4 + (True,))
    sampling = tuple(
        logprob - math.log(1.0 - lost)
        for logprob, lost in zip(call.behavior_logprobs, (0.0, 0.05, 0.2, 0.6, 0.9), strict=True)
    )
    adjusted = trajectory(dataclasses.replace(call, sampling_logprobs=sampling), reward=1.0)
    sequences, _ = prepare_step([adjusted], AlgorithmConfig(), policy_version=0)
    assert mask_metrics(sequences) == {"train/adjusted_share": 0.5}
    warm = dataclasses.replace(adjusted.transitions[0], temperature=0.7, tempered_logprobs=sampling)
    tempered = dataclasses.replace(adjusted, transitions=(warm,))
    sequences, _ = prepare_step([tempered], AlgorithmConfig(), policy_version=0)
    assert mask_metrics(sequences) == {"train/adjusted_share": pytest.approx(0.0)}


def test_what_nobody_sampled_has_no_share() -> None:
    assert mask_metrics([]) == {} == mask_metrics([sequence([1], [2])])
