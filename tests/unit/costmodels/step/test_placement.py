import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.step.pipeline.schedules import assign_layers
from costmodels.step.placement import pipelines, stage_devices, stage_kinds
from tests.support.settings.random_settings import CLUSTERS, cases


@given(
    st.sampled_from(model_names()),
    st.sampled_from(runtime_names()),
    st.sampled_from(list(CLUSTERS.values())),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
)
def test_kinds_of_stages_stand_for_all_stages(model, runtime, cluster, pp, vpp):
    """Sums, maxima and what comes before a stage are the same over kinds, with their counts, as over all stages."""
    assume(cluster.num_devices % pp == 0)
    layers = assign_layers(find_model(model), find_runtime(runtime), pp, vpp)
    stages = stage_kinds(layers, stage_devices(cluster, pp))
    weights = np.arange(1.0, layers.held.shape[1] + 1)
    of_stage, of_kind = layers.held @ weights, stages.pieces @ weights
    before_stage = np.cumsum(of_stage) - of_stage

    assert stages.count.sum() == pp
    assert stages.count @ of_kind == of_stage.sum()
    assert of_kind.tolist() == of_stage[stages.first].tolist()
    assert (stages.before @ of_kind).tolist() == before_stage[stages.first].tolist()


@given(st.sampled_from(list(CLUSTERS.values())), st.sampled_from([1, 2, 4]))
def test_stages_stand_on_the_devices_of_their_ranks(cluster, pp):
    """A stage's devices are those of its share of the ranks, counted one by one."""
    ranks = cluster.rank_device_index().reshape(pp, -1)

    found = stage_devices(cluster, pp)

    assert [np.flatnonzero(row).tolist() for row in found] == [np.unique(row).tolist() for row in ranks]


@given(cases())
def test_every_configuration_is_in_one_pipeline(case):
    """Layouts share the grid out, and each configuration's row of weights has its pp, tp and replicas."""
    found = pipelines(case.setting, case.grid)

    assert sorted(np.concatenate([pipeline.at for pipeline in found.each]).tolist()) == list(range(len(case.grid)))
    for pipeline in found.each:
        chosen, weights = case.grid.take(pipeline.at), pipeline.weights.take(pipeline.weights_of)
        for name in ("pp", "tp", "ep", "zero_stage", "copies"):
            assert np.array_equal(getattr(chosen, name), getattr(weights, name))
        assert np.array_equal(chosen.dp * chosen.cp * chosen.up, weights.dp * weights.cp * weights.up)
        assert np.array_equal(found.weights_of[pipeline.at], pipeline.weights_at[pipeline.weights_of])
