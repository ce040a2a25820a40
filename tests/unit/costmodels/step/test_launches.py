from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_prior
from costmodels.operators.layer_operators import step_operators
from costmodels.step.launches import SCORED_OPERATORS, SORTED_OPERATORS, launches_of
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

HOSTS = find_cluster("dgx-h100", hosts=2)
MEGATRON = find_prior("megatron-core")
DENSE, EXPERTS = job_of(), job_of("mixtral-8x7b")


def launches_by_role(job, runtime):
    """Launches of each operator of a layer of experts, by its role."""
    grid = ConfigGrid.from_configs([ParallelConfig(ep=8, dp=16)])
    operators = [each for each in step_operators(job, runtime, grid) if each.family.value == "experts"]
    return {each.role: launches_of(runtime, each) for each in operators}


def test_routing_launches_more_than_its_product():
    """The router's product stands for all that scores tokens, and the permutation for all that sorts them."""
    found = launches_by_role(EXPERTS, MEGATRON)

    assert found["router"] == found["router.data_gradient"] == 1 + SCORED_OPERATORS
    assert found["permute"] == found["permute.gradient"] == 1 + SORTED_OPERATORS
    assert {found[role] for role in found if not role.startswith(("router", "permute"))} == {1}


def test_a_dispatcher_that_sends_a_token_once_sorts_it_too():
    """The kernel that sends tokens sorts them, and scores them it does not."""
    found = launches_by_role(EXPERTS, replace(MEGATRON, deduplicates_tokens=True))

    assert (found["router"], found["permute"]) == (1 + SCORED_OPERATORS, 1)


def test_a_captured_router_launches_nothing():
    """What a graph of the router holds is launched with the graph, and tokens are still sorted."""
    found = launches_by_role(EXPERTS, replace(MEGATRON, captured_blocks="router"))

    assert (found["router"], found["permute"]) == (0, 1 + SORTED_OPERATORS)


@pytest.mark.parametrize("tp", [4, 8])
def test_a_step_of_small_pieces_takes_what_its_host_takes(tp):
    """Where launches take no time the device sets the pace of 512 tokens, and else the host does."""
    short = replace(DENSE, sequence_length=512)
    config = grid_of(ParallelConfig(tp=tp, dp=16 // tp))
    slow, fast = MEGATRON, replace(MEGATRON, launch_s=1e-6, collective_launch_s=1e-6)

    waits, runs = (estimate_step(setting_for(short, HOSTS, each), config) for each in (slow, fast))

    assert waits.breakdown_s["host"][0] > 0.5 * waits.step_time_s[0]
    assert runs.breakdown_s["host"][0] < 0.01 * runs.step_time_s[0]
    np.testing.assert_allclose(
        [each.breakdown_s["compute"][0] for each in (waits, runs)], runs.breakdown_s["compute"][0]
    )


def test_the_prior_of_megatron_core_is_bound_by_runs_that_wait():
    """Tests of tiny models take 0.10 to 0.18 ms per operator on three kinds of hosts: no tenth of that, and known."""
    error = dict(MEGATRON.log_errors)["launch_s"]

    assert 1e-4 < MEGATRON.launch_s < 2e-4
    assert error < 0.5
