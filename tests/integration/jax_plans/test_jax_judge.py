"""Plans of JAX functions between which XLA's compiler for GPUs decides, and what becomes of its choice."""

import json
import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec

from costmodels.sharding.device_mesh import mesh_from
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.graph import INPUT, STATE
from costmodels.xla.compiler import has_gpu_compiler
from costmodels.xla.schedule import Replayed
from docs.site.json_keys import JSON_KEYS
from hardware.device import find_device
from hardware.io.errors import ConfigError
from tests.support.benchmark_runs import ROOT
from tests.support.programs.jax_perceptron import ARGUMENTS, step
from tests.support.rehearsal.jax_study import gpu_compiler
from tuner.planners import jax_plans, plan_jax
from tuner.planners.jax_judge import Compiled
from tuner.planners.judged import DATA_PARALLEL, candidates_of
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.pins import Pin

MISSING = "needs XLA's compiler for GPUs, which `make frameworks` installs"
AXES = {"data": 2, "model": 4}
OPTIONS = PlannerOptions(whole_axes=True)


class Recorded:
    """A judge in the place of XLA's compiler, whose package is not installed here: it says what it is told to."""

    device = find_device("h100")

    def __init__(self, *said):
        self.said = list(said)
        self.steps = []

    def compile(self, step, mesh):
        """Return the next schedule of those that were recorded, or raise the next refusal."""
        self.steps.append(step)
        assert mesh.num_devices == 8
        said = self.said.pop(0) if self.said else 9.0
        if isinstance(said, Exception):
            raise said
        times = Replayed(compute_s=said, comm_s=0.0, step_time_s=said, collectives=0, synchronous=0)
        return Compiled(replayed=times, memory_bytes=1e9, compile_s=1.0)


def judged(monkeypatch, *said, **more):
    """A plan between whose candidates a recorded judge has decided."""
    judge = Recorded(*said)
    monkeypatch.setattr(jax_plans, "judge_of", lambda _name, _mesh: judge)
    return plan_jax(step, *ARGUMENTS, mesh=AXES, judge="h100", **({"options": OPTIONS} | more))


def test_plain_data_parallelism_is_a_candidate():
    """It cuts the batch by all axes and no parameter; each plan is a candidate once, with the price of its own."""
    graph, mesh = graph_of_jax(step, *ARGUMENTS), mesh_from(AXES, "h100")
    found = plan_graph(graph, mesh, OPTIONS)
    candidates = candidates_of(found, graph, mesh, OPTIONS, may_propagate=True)
    plain = candidates[-1]

    assert (candidates[0].planned, plain.name) == (found, DATA_PARALLEL)
    assert len({(each.is_propagated, each.planned.plan.served.tobytes()) for each in candidates}) == len(candidates)
    for op in graph.ops:
        if op.primitive in (INPUT, STATE) and graph.tensors[op.results[0]].shape:
            cut = plain.planned.plan.dims_of(op.results[0])
            assert cut == ((("data", "model"), ()) if op.name.startswith("batch") else ((), ())), op.name
    assert plain.planned.step_time_s >= plain.planned.cost.compute_s.sum()


def test_layouts_that_xla_propagates_are_not_pinned(monkeypatch):
    """Where a candidate that XLA propagates is fastest, the function is the user's own, and only arguments are cut."""
    count = len(judged(monkeypatch).judged)
    plan = judged(monkeypatch, *(9.0,) * (count - 1), 1.0)

    assert (plan.judged[-1].name, plan.judged[-1].is_answer) == (DATA_PARALLEL, True)
    assert plan.is_propagated
    assert plan.function is step
    assert plan.constraints == plan.more_sent == ()
    assert plan.in_specs[1]["x"] == PartitionSpec(("data", "model"), None)
    text = plan.shardy(platform="cuda")
    assert "sdy.sharding_constraint" not in text
    assert '<@mesh, [{"data", "model"}, {}]>' in text


def test_a_refusal_is_told(monkeypatch):
    """What the compiler refuses is no answer, and if it refuses all, the first line of its refusal is the error."""
    plan = judged(monkeypatch, ValueError("no such layout\nat all"), 2.0, 3.0)

    assert plan.judged[0].refusal == "no such layout"
    assert plan.judged[1].is_answer
    with pytest.raises(ConfigError, match="compiles no candidate: never"):
        judged(monkeypatch, *(ValueError("never") for _ in plan.judged))


@pytest.mark.parametrize(
    "more",
    [
        {"in_shardings": ({"up": PartitionSpec(None, "model"), "down": None}, None)},
        {"options": PlannerOptions(whole_axes=True, pins=(Pin(op="batch.x", dim="result.0", axis="data"),))},
    ],
    ids=["in_shardings", "pins"],
)
def test_what_the_user_pins_is_not_left_to_xla(monkeypatch, more):
    """With pins or shardings of the user's, no candidate is propagated."""
    assert not any(each.is_propagated for each in judged(monkeypatch, **more).judged)


def test_the_cluster_is_that_of_the_judge(monkeypatch):
    """Without a cluster, the mesh lies on hosts of the judge's device; with another's, XLA is not asked."""
    assert judged(monkeypatch, 1.0).planned.plan.mesh.cluster.devices[0].name == find_device("h100").name
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="must be the device of the cluster dgx-a100"):
        plan_jax(step, *ARGUMENTS, mesh=AXES, cluster="dgx-a100", judge="h100")


@pytest.mark.skipif(has_gpu_compiler(), reason="XLA's compiler for GPUs is installed here")
def test_the_missing_compiler_is_named():
    """Without the package, the error names it, in the version of JAX."""
    with pytest.raises(ConfigError, match=f"pip install jax-cuda12-pjrt=={jax.__version__}"):
        plan_jax(step, *ARGUMENTS, mesh=AXES, judge="h100")


@pytest.mark.skipif(gpu_compiler() is None, reason=MISSING)
def test_xla_compiles_for_devices_that_are_not_here():
    """XLA's schedules for eight H100 have kernels, collectives and memory, and the fastest that fits is the answer."""
    command = ("plan", "--jax", "benchmarks.zoo:gemma_small_scan", "--mesh", "data=2,model=4", "--judge", "h100")
    program = "import sys; from tuner.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--whole-axes", "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(gpu_compiler())])},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)

    assert told.keys() == (JSON_KEYS["plan"][""] | JSON_KEYS["plan"]["with `--judge`, also"]).keys()
    first, *others = told["judged"]
    assert len(others) >= 2
    assert first["is_answer"]
    assert not any(each["is_answer"] for each in others)
    for each in told["judged"]:
        assert each["refusal"] is None
        assert each["fits"]
        assert each["scheduled_s"] >= each["compute_s"] > 0
        assert each["compiled_bytes"] > 0
        assert first["scheduled_s"] <= 1.005 * each["scheduled_s"]
