"""Plans of a study's candidate in the words of Megatron-LM, and files that JSON reads back."""

import json

import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.exports.megatron_template import megatron_parallelism
from costmodels.sharding.plan import cost_of
from hardware.io.errors import ConfigError
from tests.support.graphs.shared_factors import served_together
from tests.unit.tuner.export.test_export import flags_of, setting_of
from tuner.plans.plan_export import PLAN_EXPORTERS, PlanSource, config_of, export_plan
from tuner.plans.sharding_plans import of_candidate

CANDIDATE = ParallelConfig(pp=8, dp=2, tp=4, mbs=2, zero_stage=0)
TENSOR = ("kv_heads", "heads", "ffn", "vocabulary")
STATES = tuple((pattern, ("hidden",)) for pattern in ("*.update", "*_moment"))


def source_of(**axes):
    """A plan of the candidate's layer by hand."""
    setting = setting_of()
    graph, mesh = of_candidate(setting, CANDIDATE)
    return PlanSource(plan=served_together(graph, mesh, **axes), candidate=(setting, CANDIDATE))


USUAL = {"dp": [*STATES, ("*", ("batch",))], "tp": [("*", TENSOR)]}


def test_a_recognised_plan_is_flags():
    """Data and tensor parallelism with sharded states are the flags of that configuration, and no others."""
    exported = export_plan("megatron", source_of(**USUAL))
    flags = flags_of(exported.text)

    sizes = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel", "micro-batch")
    assert [flags[f"--{name}-size"] for name in sizes] == [["4"], ["8"], ["1"], ["2"]]
    assert "--use-distributed-optimizer" in flags
    assert "--sequence-parallel" not in flags
    assert exported.content["roles"] == {"dp": "data parallelism and ZeRO 1", "tp": "tensor parallelism"}
    assert exported.notes == ()


def test_an_axis_is_what_it_cuts():
    """An axis called tp that cuts the batch is data parallelism: the micro-batch is dealt out to as many more ranks."""
    source = source_of(dp=[("*", ("batch",))], tp=[("*", ("sequence", "queries"))])
    config = config_of(megatron_parallelism(source.plan), CANDIDATE)

    assert (config.tp, config.cp, config.dp, config.mbs) == (1, 4, 2, 2)
    assert config.num_devices == CANDIDATE.num_devices
    assert any(
        note.startswith("cp: the plan gathers keys and values") for note in export_plan("megatron", source).notes
    )


def test_ranks_that_stand_elsewhere_are_noted():
    """Tensor parallelism along the slower axis is exported, with a note that Megatron-LM places it otherwise."""
    exported = export_plan("megatron", source_of(dp=[("*", TENSOR)], tp=[("*", ("batch",))]))

    assert flags_of(exported.text)["--tensor-model-parallel-size"] == ["2"]
    assert flags_of(exported.text)["--micro-batch-size"] == ["1"]
    assert [note.partition(":")[0] for note in exported.notes] == ["ranks"]


def test_a_plan_without_a_candidate_is_refused():
    """Megatron-LM's flags need a study's model, whatever the graph looks like."""
    with pytest.raises(ConfigError, match="is only for plans of a study's model"):
        export_plan("megatron", PlanSource(plan=source_of(**USUAL).plan))


@pytest.mark.parametrize("target", [target for target in PLAN_EXPORTERS if target not in ("megatron", "shardy")])
def test_files_are_json(target):
    """What is written is what `--json` has, on lines of its own for each entry, and a preview is short."""
    source = source_of(**USUAL)
    exported = export_plan(target, source)

    assert json.loads(exported.text) == json.loads(json.dumps(exported.content))
    assert exported.content["format"] == target
    assert len(exported.lines) <= 20
    assert max(map(len, exported.text.splitlines())) < 1000


@pytest.mark.parametrize(("target", "key"), [("jax", "constraints"), ("torch", "redistributions")])
def test_every_collective_stands_at_a_change(target, key):
    """Each collective of the plan's cost belongs to a tensor that the file has a change of layout for."""
    source = source_of(**USUAL)
    changes = {(each["tensor"], each["op"]) for each in export_plan(target, source).content[key]}

    graph = source.plan.graph
    sent = {(graph.tensors[each.tensor].name, graph.ops[each.op].name) for each in cost_of(source.plan).collectives}
    assert len(sent) > 20
    assert sent <= changes
