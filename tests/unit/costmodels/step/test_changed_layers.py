"""What a sharding plan changes of layers: of block costs, of a step's parts, and of simulated steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.job.layer_change import PLANNED_BLOCKS
from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.block_costs import block_costs
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.memory.activations import layer_activations
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.graphs.layer_changes import at, change_for, random_change
from tests.support.settings.model_parts import row_of
from tests.support.settings.random_settings import cases, grid_of, job_of, setting_for

MEGATRON = replace(find_runtime("megatron-core"), residuals=())
"""Without what calibration has left, which scales whole steps."""
CLUSTER = find_cluster("dgx-h100")
TWO_HOSTS = find_cluster("dgx-h100", hosts=2)
JOB = job_of(batch=32)
CONFIG = ParallelConfig(tp=4, dp=2)
DENSE, HEAD = map(PLANNED_BLOCKS.index, ("dense_mlp", "head"))
COLUMNS = [PLANNED_BLOCKS.index(name) for name in JOB.model.block_names]
"""Columns of a change, in the order of the blocks of the model."""
TP, CP = EXPOSED_PARTS.index("tp"), EXPOSED_PARTS.index("cp")
SIZES = (2, len(EXPOSED_PARTS), len(PLANNED_BLOCKS))


def with_change(runtime, *changes):
    """A runtime whose layers are changed."""
    return replace(runtime, layer_changes=changes)


def costs(*configs, changes=()):
    """The block costs of some configurations, a row each."""
    return block_costs(
        setting_for(JOB, CLUSTER, with_change(MEGATRON, *changes)), grid_of(*configs), kernel_s, collective_s
    )


def breakdown(config, *changes, runtime=MEGATRON, cluster=CLUSTER, job=JOB):
    """The parts of one configuration's step."""
    estimate = estimate_step(setting_for(job, cluster, with_change(runtime, *changes)), grid_of(config))
    return {part: float(seconds[0]) for part, seconds in estimate.breakdown_s.items()}


# Of estimates


@given(cases(), st.sampled_from(["none", "full", "selective"]))
@settings(max_examples=15)
def test_a_change_of_nothing_changes_no_bit(case, recompute):
    """Ratios of 1 and nothing added leave every estimate as it was."""
    grid = grid_of(*(replace(case.grid.config(row), recompute=recompute) for row in range(len(case.grid))))
    changes = {change.key: change for change in (change_for(grid.config(row)) for row in range(len(grid)))}

    plain = estimate_step(case.setting, grid)
    changed = estimate_step(replace(case.setting, runtime=with_change(case.runtime, *changes.values())), grid)

    assert (plain.step_time_s == changed.step_time_s).all()
    assert all((plain.breakdown_s[part] == changed.breakdown_s[part]).all() for part in plain.breakdown_s)


def test_ratios_scale_their_block_pass_and_part():
    """Each ratio multiplies what it is for, and no other shape has any of it."""
    other = replace(CONFIG, mbs=2)
    change = random_change(CONFIG, 1, seconds=0.0)
    plain, changed = costs(CONFIG, other), costs(CONFIG, other, changes=[change])

    assert changed.compute[0, :, :, 0] == pytest.approx(
        np.array(change.compute)[:, COLUMNS] * plain.compute[0, :, :, 0]
    )
    assert changed.exposed[0, :, :, 0] == pytest.approx(
        np.array(change.exposed)[:, COLUMNS] * plain.exposed[0, :, :, 0]
    )
    assert (changed.compute[..., 1] == plain.compute[..., 1]).all()
    assert (changed.exposed[..., 1] == plain.exposed[..., 1]).all()
    assert (changed.host == plain.host).all()


def test_another_shape_is_not_changed():
    """A change is for one shape: any other degree of it, and it is not the same."""
    others = {name: getattr(CONFIG, name) + 1 for name in ("tp", "cp", "up", "mbs", "expert_tp")}

    for name, value in (others | {"sequence_parallel": not CONFIG.sequence_parallel}).items():
        change = random_change(replace(CONFIG, **{name: value}), 1)
        assert breakdown(CONFIG, change) == breakdown(CONFIG), name


def test_what_runs_again_is_changed_as_the_forward_pass():
    """Full recomputation repeats a layer's forward pass with its ratio; embedding and head are not repeated."""
    full = replace(CONFIG, recompute="full")
    change = random_change(full, 2, seconds=0.0)
    forward, backward = np.array(change.compute)[:, COLUMNS]
    none, plain, changed = costs(CONFIG), costs(full), costs(full, changes=[change])

    again = plain.compute[0, 1, :, 0] - none.compute[0, 1, :, 0]
    assert again[row_of(JOB.model, "attention")] > 0
    assert again[row_of(JOB.model, "head")] == 0
    assert changed.compute[0, 1, :, 0] == pytest.approx(backward * none.compute[0, 1, :, 0] + forward * again)


@pytest.mark.parametrize(("recompute", "forward_passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_what_is_added_is_exposed_in_full(recompute, forward_passes):
    """Each micro-batch and layer waits for it, as long as the runtime's links take; recomputation sends it again.

    What is added to the head is sent once a pass, also where layers are recomputed.
    """
    config = replace(CONFIG, recompute=recompute)
    forward_s, backward_s, head_s = 3e-4, 5e-4, 1e-3
    added_s = at(0, CP, DENSE, shape=SIZES, value=forward_s) + at(1, CP, DENSE, shape=SIZES, value=backward_s)
    added_s += at(0, TP, HEAD, shape=SIZES, value=head_s)
    plain, changed = breakdown(config), breakdown(config, change_for(config, added_s=added_s))

    expected_s = 16 * 32 * (forward_passes * forward_s + backward_s) / MEGATRON.network_efficiency
    assert changed["cp"] - plain["cp"] == pytest.approx(expected_s)
    assert changed["tp"] - plain["tp"] == pytest.approx(16 * head_s / MEGATRON.network_efficiency)
    # what the host or the gradients' sums hide beside longer passes is theirs
    assert all(changed[part] == plain[part] for part in ("compute", "up", "ep", "pp", "optimizer"))


# Of the weights' traffic


def test_what_weights_send_more_is_hidden_by_nothing():
    """Once a step and layer, beside data parallelism's own."""
    more = change_for(CONFIG, once_s=at(DENSE, shape=len(PLANNED_BLOCKS), value=1e-3))

    plain, changed = breakdown(CONFIG), breakdown(CONFIG, more)
    assert changed["dp"] - plain["dp"] == pytest.approx(32 * 1e-3 / MEGATRON.network_efficiency)
    assert {part for part in plain if plain[part] != changed[part]} <= {"dp", "overhead"}


def test_what_weights_save_leaves_the_same_share_exposed():
    """Half of the traffic saved is half of the waits for it, and no more than all of it can be saved.

    Where nothing hides it, the waits are the traffic.
    """
    runtime = replace(MEGATRON, overlaps_gradients=False, overlaps_weight_gather=False)
    plain = breakdown(CONFIG, runtime=runtime)["dp"]
    for share, left in ((0.5, 0.5), (1.0, 0.0), (3.0, 0.0)):
        saved_s = -share * plain / 32 * runtime.network_efficiency
        change = change_for(CONFIG, once_s=at(DENSE, shape=len(PLANNED_BLOCKS), value=saved_s))
        assert breakdown(CONFIG, change, runtime=runtime)["dp"] == pytest.approx(left * plain, abs=1e-12)


def test_hidden_traffic_that_is_saved_gains_what_of_it_was_exposed():
    """With traffic beside the passes, saving all of it gains its exposed part and not what it took."""
    hidden = breakdown(CONFIG)["dp"]
    alone = breakdown(CONFIG, runtime=replace(MEGATRON, overlaps_gradients=False, overlaps_weight_gather=False))["dp"]
    change = change_for(CONFIG, once_s=at(DENSE, shape=len(PLANNED_BLOCKS), value=-alone))

    assert hidden < 0.7 * alone
    assert breakdown(CONFIG, change)["dp"] == pytest.approx(0.0, abs=1e-12)


# Of anything


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_changed_steps_stay_positive(case, seed):
    """Whatever a change says, no part of any step is negative, and the parts are the step."""
    changes = {}
    for row in range(len(case.grid)):
        change = random_change(case.grid.config(row), seed + row)
        changes.setdefault(change.key, change)
    found = estimate_step(replace(case.setting, runtime=with_change(case.runtime, *changes.values())), case.grid)

    assert (found.step_time_s > 0).all()
    assert all((seconds >= 0).all() for seconds in found.breakdown_s.values())
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_time_s)


# Of simulated steps


def simulated(job, cluster, runtime, config):
    """A simulated step's time."""
    return simulate_step(setting_for(job, cluster, runtime), config).step_time_s


@given(cases(max_configs=1))
@settings(max_examples=10)
def test_a_change_of_nothing_leaves_the_simulated_step(case):
    """Neither the step nor any part of it is another one."""
    config = case.grid.config(0)
    micro_batches = case.job.global_batch_size // (config.dp * config.mbs)
    assume(micro_batches * config.pp * config.vpp <= 500)
    assume(config.vpp == 1 or micro_batches % config.pp == 0)
    plain = simulate_step(case.setting, config)
    changed = simulate_step(replace(case.setting, runtime=with_change(case.runtime, change_for(config))), config)

    assert changed.step_time_s == plain.step_time_s
    assert changed.breakdown_s == plain.breakdown_s


@given(
    runtime=st.sampled_from(runtime_names()),
    pp=st.sampled_from([1, 2]),
    rounds=st.integers(4, 8),
    recompute=st.sampled_from(["none", "selective", "full"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=15)
def test_the_simulator_agrees_about_a_change(runtime, pp, rounds, recompute, seed):
    """Within 2%, as it does without one (test_simulated_step.py), where no tensor traffic runs beside products.

    Where some does, the closed form scales what is exposed of it, and the simulator hides what is left of it beside
    products that are shorter or longer: within 10%.
    """
    profile = replace(find_runtime(runtime), layer_split="even", layer_padding=1, residuals=(), stalled_hosts=0)
    assume(recompute != "full" or not profile.overlaps_tensor)
    job = job_of("llama3-8b", batch=rounds * pp, vocab_size=64)
    cluster = find_cluster("dgx-h100", hosts=pp)
    config = ParallelConfig(pp=pp, tp=8, recompute=recompute, sequence_parallel=True, zero_stage=0)
    profile = with_change(profile, random_change(config, seed))

    closed_form_s = float(estimate_step(setting_for(job, cluster, profile), grid_of(config)).step_time_s[0])
    simulated_s = simulated(job, cluster, profile, config)
    is_beside = profile.overlaps_tensor or profile.overlaps_tensor_gradients
    assert simulated_s == pytest.approx(closed_form_s, rel=0.1 if is_beside else 0.02)


@pytest.mark.parametrize(("overlaps", "share"), [(True, -0.5), (True, 0.5), (False, -2.0), (False, -0.5), (False, 0.5)])
def test_the_simulator_agrees_about_the_weights_traffic(overlaps, share):
    """What a change saves of it or adds to it, as a share of what it takes, is within 2% of the step in both."""
    runtime = replace(MEGATRON, overlaps_gradients=overlaps, overlaps_weight_gather=overlaps)
    config = ParallelConfig(tp=2, dp=8)
    alone = breakdown(config, runtime=replace(runtime, overlaps_gradients=False), cluster=TWO_HOSTS)["dp"]
    change = change_for(config, once_s=at(DENSE, shape=len(PLANNED_BLOCKS), value=share * alone / 32))
    changed = with_change(runtime, change)

    closed_form_s = float(estimate_step(setting_for(JOB, TWO_HOSTS, changed), grid_of(config)).step_time_s[0])
    assert simulated(JOB, TWO_HOSTS, changed, config) == pytest.approx(closed_form_s, rel=0.02)
    if share > 0 or not overlaps:
        assert abs(simulated(JOB, TWO_HOSTS, runtime, config) - closed_form_s) > 0.02 * closed_form_s


def test_a_change_of_what_layers_keep_changes_their_activations_alone():
    """Half of what blocks keep halves the activations that wait for the backward pass, and no states."""
    kept = tuple(0.5 if name in ("attention", "dense_mlp") else 1.0 for name in PLANNED_BLOCKS)
    for recompute, entry in (("none", 1.0), ("full", 0.5)):
        config = replace(CONFIG, recompute=recompute)
        change = replace(change_for(replace(config, plan="descent")), kept=kept, entry=entry)
        setting = setting_for(JOB, CLUSTER, with_change(MEGATRON, change))
        grids = [grid_of(replace(config, plan=plan)) for plan in (HAND, change.plan)]
        hand, planned = (layer_activations(JOB, setting.runtime, unique_shapes(grid)[0]) for grid in grids)
        parts = [estimate_memory(setting, grid).parts_bytes for grid in grids]

        layers = JOB.model.is_layer_piece
        assert planned.kept[layers] == pytest.approx(0.5 * hand.kept[layers])
        assert parts[1]["activations"][0] < parts[0]["activations"][0]
        assert parts[1]["optimizer"] == pytest.approx(parts[0]["optimizer"])
