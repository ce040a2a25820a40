"""Every configuration trains the same model: losses and gradient norms are those of one process."""

import functools
import itertools

import pytest

from costmodels.job.parallel_config import DEGREES, ParallelConfig, parse_config
from costmodels.job.runtime import find_runtime
from tests.support.programs.training_ranks import GPT, LLAMA, MIXTRAL, QWEN, job_of, train, train_alone_dropping_like

RUNTIME = find_runtime("torch-reference")
RELATIVE = 1e-4

# on eight processes at most three of pp, tp, dp, cp and up exceed one
CASES = {
    LLAMA: [
        "tp=2,sequence_parallel=false,mbs=4",
        "cp=4,up=2,mbs=4",
        "dp=4,zero_stage=0,mbs=2",
        "dp=4,zero_stage=2",
        "dp=4,zero_stage=3,mbs=2",
        "dp=4,dp_shard=2,zero_stage=3",
        "pp=2,dp=2,vpp=2,zero_stage=3,mbs=2",
        "pp=2,cp=2,recompute=full,mbs=2",
        "tp=2,cp=2,recompute=selective,mbs=2",
        "pp=2,layers=3/1,recomputed=1/0,mbs=2",
    ],
    GPT: ["pp=2,tp=2,mbs=2", "pp=2,tp=2,sequence_parallel=false", "cp=2,up=2,mbs=4", "pp=4,dp=2,zero_stage=3"],
    MIXTRAL: [
        "pp=2,tp=2,dp=2,vpp=2,ep=2,mbs=2",
        "pp=2,cp=2,up=2,vpp=2,ep=2,mbs=2",
        "tp=2,cp=2,up=2,ep=2,mbs=2",
        "dp=2,cp=2,up=2,ep=2,mbs=2",
        "dp=2,ep=2,tp=2,zero_stage=3",
        "dp=4,ep=4,zero_stage=0",
        "tp=2,dp=2,ep=4,expert_tp=1",
        "pp=2,dp=2,ep=2,recompute=full",
    ],
    QWEN: ["tp=2,dp=2,ep=2"],
}
PAIRS = [(model, text) for model, texts in CASES.items() for text in texts]


def _configuration(text):
    return parse_config(text, {"zero_stage": 1, "sequence_parallel": "tp=" in text})


@pytest.fixture(scope="module")
def alone(on_ranks):
    """What one process computes for a model."""
    return functools.cache(lambda model: on_ranks(1, train, job_of(model), RUNTIME, ParallelConfig())[0][0])


@pytest.mark.parametrize(("model", "text"), PAIRS, ids=[f"{model.name}-{text}" for model, text in PAIRS])
def test_a_configuration_trains_like_one_process(on_ranks, alone, model, text):
    """Losses and global gradient norms of three steps differ by rounding only, and all ranks agree on them."""
    job, config = job_of(model), _configuration(text)

    told = on_ranks(config.num_devices, train, job, RUNTIME, config)

    for (steps,) in told:
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, alone(model), strict=True):
            assert loss == pytest.approx(expected_loss, rel=RELATIVE)
            assert norm == pytest.approx(expected_norm, rel=RELATIVE)


def test_training_learns(alone):
    """The loss falls from step to step, so that equal losses say something."""
    losses = [loss for loss, _ in alone(LLAMA)]

    assert losses[0] - losses[-1] > 0.1
    assert losses == sorted(losses, reverse=True)


def test_dropping_tokens_is_the_same_with_the_same_capacity_per_rank(on_ranks, alone):
    """Where every rank's experts take at most 0.8 of their share, one process that drops likewise agrees."""
    job, config = job_of(MIXTRAL), _configuration("tp=2,cp=2,ep=2,mbs=2")

    (expected,) = on_ranks(1, train_alone_dropping_like, job, RUNTIME, config, 0.8)[0]
    told = on_ranks(config.num_devices, train, job, RUNTIME, config, 0.8)

    assert told[0][0] == [pytest.approx(step, rel=RELATIVE) for step in expected]
    assert expected[0] != pytest.approx(alone(MIXTRAL)[0], rel=RELATIVE)


def test_the_cases_cover_every_pair_of_degrees():
    """Every two degrees exceed one together somewhere, in a model that has a dense layer and layers of experts."""
    used = [{name for name in DEGREES if getattr(_configuration(text), name) > 1} for text in CASES[MIXTRAL]]

    missing = [pair for pair in itertools.combinations(DEGREES, 2) if not any(set(pair) <= names for names in used)]
    assert missing == []
