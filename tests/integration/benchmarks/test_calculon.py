"""`python -m benchmarks.papers.calculon`: measured runs in Calculon's words, and the program with a stand-in for it."""

import json
import sys

import numpy as np
import pytest

from benchmarks.papers.calculon import main
from benchmarks.papers.calculon_inputs import SYSTEMS, application_of, approximations, execution_of, inexpressible
from benchmarks.support.problems import read_runs
from costmodels.calibration.fidelity import is_clean
from costmodels.calibration.sources import setting_of
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from tests.support.benchmark_runs import ROOT
from tests.support.settings.synthetic_runs import small_model, unmeasured_run

MEASURED = ROOT / "configs" / "measured" / "ultrascale-llama-8b-128.csv"

PUBLISHED = {
    "matrix": {"float16": {"tflops": 1000}},
    "mem1": {"GiB": 80, "GBps": 3072},
    "networks": [{"bandwidth": 450, "size": 8, "efficiency": 0.65}, {"bandwidth": 50, "size": 65536}],
}

SYSTEM = """
class System:
    def __init__(self, cfg):
        self.cfg = cfg
"""

LLM = """
class Llm:
    class Error(Exception):
        pass

    class Application:
        def __init__(self, cfg):
            self.cfg = cfg

    class Execution:
        @staticmethod
        def from_json(cfg):
            return cfg

    def __init__(self, app, log):
        self.app = app

    def compile(self, system, exe):
        if exe["microbatch_size"] == 4:
            raise Llm.Error("too large")

    def run(self, system):
        assert system.cfg["mem1"]["GiB"] > 80

    def get_total_time(self):
        return 1.25
"""
"""The few names of Calculon that the program calls: they predict one time for all runs, and refuse one size."""

REFUSED_MBS, PREDICTED_S = 4, 1.25


def plain(config, **changes):
    """Return a run of a model with an MLP of two matrices, and its setting under Megatron-LM of 2022."""
    run = unmeasured_run(small_model(2048).changed(gated_ffn=False), config, source="megatron-seqsel", **changes)
    return run, setting_of(run, {}).setting


def test_a_run_of_korthikanti_is_expressed_as_calculons_own_validation_does():
    """Selective recomputation with sequence parallelism becomes its validation/seqsel/tab5 file of the same run."""
    config = ParallelConfig(tp=8, pp=8, vpp=1, recompute="selective", zero_stage=0, sequence_parallel=True)
    run, setting = plain(config, global_batch_size=64, device="A100-SXM-80", precision="fp16")

    assert inexpressible(run, setting) is None
    assert approximations(run, setting) == ()
    assert application_of(run) == {
        "hidden": 2048,
        "feedforward": 8192,
        "seq_size": 2048,
        "attn_heads": 32,
        "attn_size": 64,
        "num_blocks": 8,
    }
    assert execution_of(run, setting) == {
        "num_procs": 64,
        "tensor_par": 8,
        "pipeline_par": 8,
        "data_par": 1,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 0,
        "batch_size": 64,
        "microbatch_size": 1,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": "attn_only",
        "pipeline_interleaving": 1,
        "optimizer_sharding": False,
        "tensor_par_comm_type": "rs_ag",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": True,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (ParallelConfig(dp=8), {"device": "V100-SXM-32"}, "no file for these devices"),
        (ParallelConfig(dp=4, cp=2), {}, "no context parallelism"),
        (ParallelConfig(dp=8, zero_stage=3), {}, "no sharded weights"),
        (ParallelConfig(dp=8, dp_shard=4), {}, "no sharding over a part of the replicas"),
        (ParallelConfig(pp=2, assignment=Assignment(layers=(3, 5))), {}, "no uneven work"),
        (
            ParallelConfig(dp=8, recompute="selective"),
            {"recompute_modules": ("mlp",)},
            "no recomputation of these modules",
        ),
        (ParallelConfig(dp=8), {"precision": "fp8"}, "its type of 16 bits only"),
    ],
)
def test_what_calculon_lacks_is_said(config, changes, reason):
    """A run outside Calculon's words is refused with the word that is missing."""
    assert inexpressible(*plain(config, **changes)) == reason


@pytest.fixture
def checkout(tmp_path):
    """Return a folder that looks like a checkout of Calculon and holds the stand-in."""
    (tmp_path / "calculon" / "llm").mkdir(parents=True)
    (tmp_path / "systems").mkdir()
    (tmp_path / "calculon" / "__init__.py").write_text(SYSTEM, encoding="utf-8")
    (tmp_path / "calculon" / "llm" / "__init__.py").write_text("from .llm import Llm", encoding="utf-8")
    (tmp_path / "calculon" / "llm" / "llm.py").write_text(LLM, encoding="utf-8")
    for name in SYSTEMS.values():
        (tmp_path / "systems" / name).write_text(json.dumps(PUBLISHED), encoding="utf-8")
    yield tmp_path
    for name in ("calculon", "calculon.llm", "calculon.llm.llm"):
        sys.modules.pop(name, None)


def test_both_are_judged_on_the_same_runs(checkout, capsys):
    """A run that Calculon refuses counts for neither, and its reason is told."""
    clean = [run for run in read_runs([MEASURED])[0] if run.step_time_s and is_clean(run)]
    small = np.array([run.step_time_s for run in clean if run.config.mbs != REFUSED_MBS])

    assert main(["--calculon", str(checkout), "--measured", str(MEASURED), "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    (source,) = found["sources"]
    assert (source["source"], source["nearly"]) == ("ultrascale-playbook", ["gated MLP", "fused attention"])
    assert source["runs"] == found["all"]["runs"] == len(small)
    assert source["calculon"]["median_ape"] == pytest.approx(np.median(np.abs(PREDICTED_S / small - 1)))
    assert 0 < source["meshtune"]["median_ape"] < 1
    assert found["exactly"]["runs"] == found["multi_node_a100"]["runs"] == 0
    assert found["refused"] == {"Calculon: too large": len(clean) - len(small)}
