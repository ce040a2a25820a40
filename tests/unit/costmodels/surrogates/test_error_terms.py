import functools
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.blocks.operator import COLLECTIVES
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernels import collective_s, execution_s, kernel_s
from costmodels.step.executions import collective_executions, operator_executions
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.error_terms import step_terms
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import MIXED, cases, grid_of, job_of, meshes, setting_for

HOST = find_cluster("dgx-h100")
HOSTS = find_cluster("dgx-h100", hosts=4)
OWN_CONSTANTS = ("launch_s", "collective_launch_s", "pending_transfer_s", "hop_launch_s", "stall_s", "step_overhead_s")
"""Times of a runtime that are no operator's and no collective's."""


def plain(name, **fields):
    """A runtime of which nothing overlaps, whose host costs nothing."""
    profile = find_runtime(name)
    hides = [field for field in profile.__dataclass_fields__ if field.startswith("overlaps_")]
    return replace(
        profile,
        **dict.fromkeys(hides, False),
        captured_graph=True,
        residuals=(),
        straggler_share=0.0,
        stalled_hosts=0,
        **fields,
    )


def errors_of(name, shape, *, deviation, seed):
    """What a term is mispriced by at `shape` [..., d]: unlike from term to term and from shape to shape [...]."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    waves = rng.normal(size=shape.shape[-1])
    angle = np.log2(np.maximum(shape, 1.0)) @ waves + rng.uniform(0, 2 * np.pi)
    return deviation * np.sqrt(2) * np.cos(angle)


def exact_change(setting, grid, memory, error):
    """log(step time with errors over that without) [n], by `estimate_step`."""
    plain_s = estimate_step(setting, grid, memory=memory).step_time_s
    with_errors = estimate_step(
        setting,
        grid,
        memory=memory,
        kernel_time=lambda operator, *rest: kernel_s(operator, *rest) * np.exp(error(operator.name, operator.shape)),
        collective_time=lambda collective: collective_s(collective) * np.exp(error(collective.name, collective.shape)),
    )
    return np.log(with_errors.step_time_s / plain_s)


def candidates(job, cluster, **fields):
    """All meshes of a cluster with three sizes of micro-batches, with and without model chunks."""
    found = [
        ParallelConfig(pp=pp, tp=tp, dp=dp, cp=cp, up=up, vpp=vpp, mbs=mbs, **fields)
        for pp, tp, dp, cp, up in meshes(cluster.num_devices)
        for mbs in (1, 2, 4)
        for vpp in (1, 2)
        if job.global_batch_size % (dp * mbs) == 0 and vpp <= pp <= job.model.num_layers and tp <= 8
    ]
    return ConfigGrid.from_configs(found)


def sweep(model, cluster, runtime, **fields):
    """The setting of a job, and all its candidates."""
    setting = setting_for(job_of(model), cluster, find_runtime(runtime))
    return setting, candidates(setting.job, cluster, **fields)


SWEEPS = {
    "llama3-8b, megatron-core": sweep("llama3-8b", HOSTS, "megatron-core"),
    "llama3-8b, torchtitan": sweep("llama3-8b", HOSTS, "torchtitan", zero_stage=3),
    "mixtral-8x7b, megatron-core": sweep("mixtral-8x7b", HOSTS, "megatron-core", zero_stage=1),
    "llama3-8b, unlike hosts": sweep("llama3-8b", MIXED, "nanotron", recompute="full"),
}


# Against the whole cost model


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_errors_are_put_together_as_the_cost_model_does(name):
    """Errors of 5% and 10% from term to term move the step as they move `estimate_step`.

    The steps themselves change by a third of that. Half of the candidates agree to 0.02% and 19 of 20 to a
    tenth of the errors; the others have stages, or compute and traffic, that are almost equally long.
    """
    setting, grid = SWEEPS[name]
    memory = estimate_memory(setting, grid)
    terms = step_terms(setting, grid, memory=memory)
    for deviation in (0.05, 0.1):
        off = []
        for seed in range(2):
            error = functools.partial(errors_of, deviation=deviation, seed=seed)
            expected = exact_change(setting, grid, memory, error)
            found = terms.log_change([error(term.name, term.shape)[None] for term in terms.terms])[0]
            off.append(np.abs(found - expected))

        assert np.median(off) < 2e-4
        assert np.quantile(off, 0.95) < deviation / 10
        assert np.max(off) < 0.8 * deviation


@pytest.mark.slow
@settings(max_examples=8)
@given(cases())
def test_elasticities_sum_to_one(case):
    """A step whose terms and whose own times all grow by a share grows by it: the elasticities of both sum to 1.

    Where every operator and every collective takes 10% longer, the step is known within half a percent.
    """
    factor, runtime = 1.0001, case.runtime
    # a profile has no constant of the host that steps an offloaded optimizer
    case = replace(case, grid=replace(case.grid, offload=np.zeros_like(case.grid.offload)))
    slower = replace(
        runtime,
        **{name: factor * getattr(runtime, name) for name in OWN_CONSTANTS},
        memory_efficiency=runtime.memory_efficiency / factor,
    )
    terms = step_terms(case.setting, case.grid)

    before = estimate_step(case.setting, case.grid).step_time_s
    after = estimate_step(
        replace(case.setting, runtime=slower),
        case.grid,
        kernel_time=lambda operator, device, job, _: kernel_s(operator, device, job, runtime),
    ).step_time_s
    expected = exact_change(case.setting, case.grid, None, lambda *_: np.log(1.1))
    found = terms.log_change([np.full((1, len(term.shape)), np.log(1.1)) for term in terms.terms])[0]

    of_the_rest = (after / before - 1) / (factor - 1)
    assert np.all((terms.covered > 0) & (terms.covered < 1))
    assert terms.covered + of_the_rest == pytest.approx(1.0, abs=0.02)
    assert found == pytest.approx(expected, abs=5e-3)


# Single terms


def test_an_elasticity_is_the_share_of_the_step():
    """Where nothing hides, an operator's or a collective's elasticity is its time times its executions per step."""
    job, runtime = job_of("mixtral-8x7b"), plain("megatron-core")
    config = ParallelConfig(tp=2, dp=2, cp=2, ep=2, mbs=2, zero_stage=1)
    grid = grid_of(config)
    terms = step_terms(setting_for(job, HOST, runtime), grid)
    found = {term.name: terms.elasticity(index)[0] for index, term in enumerate(terms.terms)}
    step_s = estimate_step(setting_for(job, HOST, runtime), grid).step_time_s[0]
    expected = {
        operator.name: (execution_s(operator, HOST.devices[0], job, runtime, grid) * count)[0] / step_s
        for operator, count in operator_executions(job, runtime, grid)
    }
    for collective, _, count in collective_executions(setting_for(job, HOST, runtime), grid):
        seconds = float((collective_s(collective) * count).sum())
        expected[collective.name] = expected.get(collective.name, 0.0) + seconds / step_s

    expected = {name: share for name, share in expected.items() if share > 1e-4}

    assert {"tp.all_gather", "cp.send_recv", "ep.all_to_all", "expert_weights.reduce_scatter"} <= set(expected)
    assert found == pytest.approx(found | expected, rel=1e-3)


def test_what_hides_has_no_elasticity():
    """Ring exchanges that attention hides completely may err without moving the step; attention may not."""
    job = job_of("llama3-8b", sequence_length=131072, batch=8)
    runtime = replace(find_runtime("megatron-core"), overlap_efficiency=1.0, residuals=())
    terms = step_terms(setting_for(job, HOST, runtime), grid_of(ParallelConfig(tp=4, cp=2)))

    found = {term.name: terms.elasticity(index)[0] for index, term in enumerate(terms.terms)}

    assert runtime.overlaps_ring
    assert found.get("cp.send_recv", 0.0) == 0.0
    assert found["attention.core"] > 0.1


def test_each_candidate_has_the_errors_of_its_shapes():
    """The change is the sum of each term's elasticity times the relative error of the shape that the candidate has."""
    terms = step_terms(*SWEEPS["mixtral-8x7b, megatron-core"])
    rng = np.random.default_rng(0)
    errors = [rng.normal(0, 0.2, (3, len(term.shape))) for term in terms.terms]

    # a bundle's rows and a term's shapes are not the same rows, so this also asks whether they were matched
    expected = sum(
        terms.elasticity(index) * np.expm1(error[:, term.row])
        for index, (term, error) in enumerate(zip(terms.terms, errors, strict=True))
    )

    assert terms.log_change(errors) == pytest.approx(np.log1p(expected), abs=1e-4)


@pytest.mark.slow
def test_terms_say_what_they_are():
    """An operator's term has its device and phase, a collective's neither; shapes are distinct, and each is used."""
    terms = step_terms(*SWEEPS["llama3-8b, unlike hosts"]).terms

    assert {term.device for term in terms} == {device.name for device in MIXED.devices} | {""}
    assert len({(term.name, term.device) for term in terms}) == len(terms)
    for term in terms:
        assert (term.phase is None) == (term.device == "") == (term.kind in COLLECTIVES)
        assert len(np.unique(term.shape, axis=0)) == len(term.shape) == len(term.time_s)
        assert np.array_equal(np.unique(term.row), np.arange(len(term.shape)))


def test_no_error_makes_a_time_negative():
    """However large the errors, a step's change is a number: a term that takes no time leaves the others."""
    terms = step_terms(*SWEEPS["llama3-8b, megatron-core"])

    nothing_left = terms.log_change([np.full((1, len(term.shape)), -50.0) for term in terms.terms])[0]

    assert np.exp(nothing_left) == pytest.approx(1 - terms.covered, abs=1e-5)
