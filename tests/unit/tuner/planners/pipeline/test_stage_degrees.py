"""Tensor degrees for two kinds of hosts: against trying all pairs of degrees and all cuts, and what a plan must be."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.uneven_work import Assignment
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.stage_degrees import stage_tp_error
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import job_of, setting_for
from tuner.planners.pipeline.stage_degrees import plan_stage_degrees
from tuner.space.enumeration import SpaceOptions, build_space, enumerate_space, launchable

HEADROOM = 0.08
OPTIONS = SpaceOptions(opened=("assignment",))
ASKED = SpaceOptions(opened=("assignment",), uneven=("layers", "hosts", "stage_tp"))


def small(first, second, *, layers=6, hosts=1, batch=16):
    """A small model on two kinds of hosts of four devices."""
    groups = [{"name": name, "hosts": hosts, "devices_per_host": 4} for name in (first, second)]
    job = replace(job_of("llama-7b", num_layers=layers, batch=batch, sequence_length=2048), precision="fp16")
    return setting_for(job, cluster_from_mapping({"groups": groups}, Path()))


def seconds_of(setting, grid):
    """Predicted step times of those that fit, inf for the others [n]."""
    memory = estimate_memory(setting, grid)
    return np.where(memory.fits(HEADROOM), estimate_step(setting, grid, memory=memory).step_time_s, np.inf)


def exhaustive_s(setting, grid):
    """The shortest step over all pairs of degrees, both orders of the two hosts, and all cuts of the layers [s]."""
    num_layers = setting.job.model.num_layers
    rows = [config for config in map(grid.config, range(len(grid))) if config.vpp == 1 and config.pp == 2]
    found = []
    for first, second in itertools.permutations(rows, 2):
        same = replace(second, tp=first.tp, dp=first.dp, mbs=first.mbs)
        flows = first.tp * first.dp == second.tp * second.dp and first.dp * first.mbs == second.dp * second.mbs
        if same != first or not flows:
            continue
        for layers, hosts in itertools.product(range(1, num_layers), ((), (1, 0))):
            work = Assignment(layers=(layers, num_layers - layers), stage_tp=(first.tp, second.tp), hosts=hosts)
            config = replace(first, assignment=work)
            if stage_tp_error(setting.job, config) is None:
                found.append(config)
    return float(seconds_of(setting, ConfigGrid.from_configs(found)).min())


@pytest.mark.parametrize(
    ("first", "second"), [("dgx-a100", "v100-pcie"), ("rtx4090d", "dgx-h100"), ("v100-pcie", "rtx4090d")]
)
def test_two_degrees_are_nearly_the_best_there_are(first, second):
    """On two hosts the fastest plan takes at most 2% longer than the best pair, order and cut, and is never faster."""
    setting = small(first, second, batch=8)
    grid, _ = enumerate_space(setting, OPTIONS)
    grid = grid.take((grid.pp == 2) & (grid.cp * grid.up == 1))
    best_s = exhaustive_s(setting, grid)
    found = plan_stage_degrees(setting, grid, ("layers", "hosts"), memory_headroom=HEADROOM)

    assert best_s * (1 - 1e-9) <= seconds_of(setting, found).min() <= 1.02 * best_s


def test_every_plan_can_be_launched():
    """Both degrees obey the rules, each stage is on one kind of hosts, and every plan fits."""
    setting = small("dgx-a100", "v100-pcie", hosts=2)
    grid, _ = enumerate_space(setting, OPTIONS)
    found = plan_stage_degrees(setting, grid, ("layers", "hosts"), memory_headroom=HEADROOM)
    configs = [found.config(at) for at in range(len(found))]

    assert configs
    assert all(launchable(setting, config) for config in configs)
    assert estimate_memory(setting, found).fits(HEADROOM).all()
    kind = setting.cluster.rank_host_kind()
    for config in configs:
        order = config.assignment.hosts or range(4)
        of_stage = kind.reshape(4, -1)[list(order)].reshape(config.pp, -1)
        degree_of = {int(own[0]): tp for own, tp in zip(of_stage, config.assignment.stage_tp, strict=True)}
        assert (of_stage == of_stage[:, :1]).all()
        assert [degree_of[int(own[0])] for own in of_stage] == list(config.assignment.stage_tp)


@pytest.mark.parametrize(
    "cluster",
    [
        find_cluster("dgx-h100", hosts=2),
        cluster_from_mapping({"groups": [{"name": n, "hosts": 1} for n in ("dgx-h100", "dgx-a100", "l20")]}, Path()),
    ],
    ids=["like", "three kinds"],
)
def test_other_clusters_have_none(cluster):
    """Two degrees are for two kinds of hosts."""
    setting = setting_for(job_of("llama-7b", batch=24, sequence_length=2048), cluster)
    grid, _ = enumerate_space(setting, OPTIONS)

    assert not len(plan_stage_degrees(setting, grid, ("layers", "hosts"), memory_headroom=HEADROOM))


@pytest.mark.slow
def test_a_space_has_few_of_them_and_the_best_one():
    """Where a study asks for them, at most 15 are candidates, and the best candidate is never slower than without."""
    setting = small("dgx-a100", "v100-pcie", hosts=2, layers=12)
    asked, without = (
        build_space(setting, replace(ASKED, uneven=parts), current=None)
        for parts in (ASKED.uneven, ("layers", "hosts"))
    )
    is_unlike = np.array([bool(asked.grid.config(at).assignment.stage_tp) for at in range(len(asked.grid))])

    assert 0 < is_unlike.sum() <= 15
    best_s, before_s = (seconds_of(setting, space.grid).min() for space in (asked, without))
    assert best_s <= before_s
