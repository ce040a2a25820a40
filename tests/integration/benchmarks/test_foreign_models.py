"""Cost models of other projects in `python -m benchmarks.strangers --peers`: runs in their words, and stand-ins."""

import json
import sys

import numpy as np
import pytest

from benchmarks.strangers import calculon, llm_analysis
from benchmarks.strangers.__main__ import main
from benchmarks.strangers.foreign_model import ForeignModel
from benchmarks.support.problems import read_runs
from costmodels.calibration.fidelity import is_clean
from costmodels.calibration.sources import setting_of
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from tests.support.benchmark_runs import ROOT
from tests.support.settings.synthetic_runs import small_model, unmeasured_run

MEASURED = ROOT / "configs" / "measured" / "ultrascale-llama-8b-128.csv"

PUBLISHED = {
    "matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[0, 0.5]]}, "float8": {"tflops": 1}},
    "vector": {"float16": {"tflops": 78, "gflops_efficiency": [[0, 0.5]]}},
    "mem1": {"GiB": 80, "GBps": 2048},
    "networks": [{"bandwidth": 300, "size": 8, "efficiency": 0.65}, {"bandwidth": 25, "size": 65536}],
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

    def get_mem_tier1_cap_req(self):
        return 2**30
"""
"""The few names of Calculon that the program calls: they predict one time for all runs, and refuse one size."""

REFUSED_MBS, PREDICTED_S = 4, 1.25

CONFIG = """
ModelConfig = GPUConfig = ParallelismConfig = dict
"""

ANALYSIS = """
from enum import Enum
import logging

logger = logging.getLogger("stand-in")
ActivationRecomputation = Enum("ActivationRecomputation", ["NONE", "ATTN_COMPUTE", "FULL"], start=0)
DSZeRO = Enum("DSZeRO", ["NONE", "STAGE_1", "STAGE_2", "STAGE_3"], start=0)


class LLMAnalysis:
    def __init__(self, model, gpu, parallelism_config, flops_efficiency, hbm_memory_efficiency):
        self.dp_size = parallelism_config["dp_size"]

    def training(self, ds_zero, **_):
        assert (self.dp_size == 1) == (ds_zero.value == 0)
        return {"latency_per_iter": 2.0, "estimated_peak_memory_per_gpu": 2.0**40 / self.dp_size}
"""
"""The few names of llm-analysis: sharded replicas share memory."""


def plain(config, *, model=None, **changes):
    """Return a run of a model with an MLP of two matrices, and its setting under Megatron-LM of 2022."""
    model = model or small_model(2048).changed(gated_ffn=False)
    run = unmeasured_run(model, config, source="megatron-seqsel", **changes)
    return run, setting_of(run, {}).setting


def model_of(folder):
    """Return both projects' refusals and approximations, without their code."""
    return ForeignModel(name="", refusals=folder._REFUSALS, nearly=folder._NEARLY, predict=lambda *_: (1.0, 1.0))


def test_a_run_of_korthikanti_is_expressed_as_calculons_own_validation_does():
    """Selective recomputation with sequence parallelism becomes its validation/seqsel/tab5 file of the same run."""
    config = ParallelConfig(tp=8, pp=8, vpp=1, recompute="selective", zero_stage=0, sequence_parallel=True)
    run, setting = plain(config, global_batch_size=64, device="A100-SXM-80", precision="fp16")
    model = model_of(calculon)

    assert model.inexpressible(run, setting) is None
    assert model.approximations(run, setting) == ("vocabulary",)
    assert calculon.application_of(run) == {
        "hidden": 2048,
        "feedforward": 8192 + run.model.vocab_size // 16,
        "seq_size": 2048,
        "attn_heads": 32,
        "attn_size": 64,
        "num_blocks": 8,
    }
    assert calculon.execution_of(run, setting) == {
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


@pytest.mark.parametrize("tp", [1, 8])
def test_calculon_gets_all_parameters_of_a_llama(tp):
    """Gated MLP, grouped queries and the head become width of a plain MLP, so that the count of parameters stays."""
    model = small_model(2048).changed(num_kv_heads=8, vocab_size=128256)
    run, _ = plain(ParallelConfig(tp=tp), model=model)
    app = calculon.application_of(run)
    matrices = 4 * app["hidden"] * app["attn_heads"] * app["attn_size"] + 2 * app["hidden"] * app["feedforward"]
    wanted = model.num_layers * (2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * model.plain.ffn_size) + 128256 * 2048

    assert app["feedforward"] % tp == 0
    assert matrices * app["num_blocks"] == pytest.approx(wanted, rel=1e-3)


def test_a_device_without_a_file_is_scaled_by_what_is_published():
    """A V100's system is the A100's file with 125 of 312 TFLOP/s, 900 GB/s of memory and NVLink 2."""
    _, setting = plain(ParallelConfig(dp=8), device="V100-SXM-32", precision="fp16")
    system = calculon.system_of(setting, PUBLISHED)

    assert calculon.nearest_device(setting) == "A100-SXM-80"
    assert system["matrix"] == {"float16": {"tflops": pytest.approx(125), "gflops_efficiency": [[0, 0.5]]}}
    assert system["vector"]["float16"]["tflops"] == pytest.approx(78 * 125 / 312)
    assert system["mem1"]["GBps"] == pytest.approx(900, rel=0.01)
    assert system["networks"][0] == {"bandwidth": pytest.approx(150), "size": 8, "efficiency": 0.65}


def test_a_device_with_a_file_keeps_its_own_figures():
    """Only the hosts, their adapters and ample memory replace what Calculon's file says of an A100."""
    _, setting = plain(ParallelConfig(dp=8), device="A100-SXM-80")
    system = calculon.system_of(setting, PUBLISHED)

    assert (system["matrix"], system["vector"]) == (PUBLISHED["matrix"], PUBLISHED["vector"])
    assert (system["mem1"]["GBps"], system["networks"][0]["bandwidth"]) == (2048, 300)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (ParallelConfig(dp=4, cp=2), {}, "no context parallelism"),
        (ParallelConfig(dp=8, zero_stage=3), {}, "no sharded weights"),
        (ParallelConfig(dp=8, dp_shard=4), {}, "no sharding over a part of the replicas"),
        (ParallelConfig(pp=2, assignment=Assignment(layers=(3, 5))), {}, "no uneven work"),
        (ParallelConfig(dp=8, recompute_layers=2), {}, "no recomputation of some layers"),
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
    assert model_of(calculon).inexpressible(*plain(config, **changes)) == reason


def test_a_run_in_the_words_of_llm_analysis():
    """Sizes, published peaks and links are the run's; replicas are sharded for memory and independent for time."""
    run, setting = plain(ParallelConfig(tp=2, dp=8, zero_stage=1), device="A100-SXM-80", precision="bf16")
    shared = {"tp_size": 2, "pp_size": 1, "ep_size": 1, "sp_size": 2}

    assert model_of(llm_analysis).inexpressible(run, setting) is None
    assert llm_analysis.model_of(run) == {
        "name": run.model.name,
        "num_layers": 8,
        "n_head": 32,
        "num_key_value_heads": run.model.plain.num_kv_heads,
        "hidden_dim": 2048,
        "vocab_size": run.model.vocab_size,
        "max_seq_len": 2048,
        "ffn_embed_dim": 8192,
        "mlp_gated_linear_units": False,
        "moe_num_experts": 1,
        "moe_top_k": 1,
    }
    assert llm_analysis.gpu_of(setting) == {
        "name": "A100-SXM-80",
        "mem_per_GPU_in_GB": setting.cluster.memory_bytes / 2**30,
        "hbm_bandwidth_in_GB_per_sec": 2039,
        "intra_node_bandwidth_in_GB_per_sec": 300,
        "intra_node_min_message_latency": 8e-6,
        "peak_fp16_TFLOPS": 312,
        "inter_node_bandwidth_in_GB_per_sec": 25,
    }
    assert llm_analysis.parallelism_of(run, sharded=True) == shared | {"dp_size": 8, "rdp_size": 1}
    assert llm_analysis.parallelism_of(run, sharded=False) == shared | {"dp_size": 1, "rdp_size": 8}


def test_llm_analysis_gets_the_work_of_all_experts_that_a_token_visits():
    """Two of eight experts become one of four of twice the width: it counts the FLOPs of one expert per token."""
    sizes = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024}
    run, _ = plain(ParallelConfig(dp=8, ep=4), model=small_model(2048).changed(**sizes))
    found = llm_analysis.model_of(run)

    assert (found["ffn_embed_dim"], found["moe_num_experts"], found["moe_top_k"]) == (2048, 4, 2)


@pytest.fixture
def clones(tmp_path):
    """Return a folder that looks like one with clones of both projects, and holds the stand-ins."""
    theirs = tmp_path / "calculon"
    (theirs / "calculon" / "llm").mkdir(parents=True)
    (theirs / "systems").mkdir()
    (theirs / "calculon" / "__init__.py").write_text(SYSTEM, encoding="utf-8")
    (theirs / "calculon" / "llm" / "__init__.py").write_text("from .llm import Llm", encoding="utf-8")
    (theirs / "calculon" / "llm" / "llm.py").write_text(LLM, encoding="utf-8")
    for name in calculon.SYSTEMS.values():
        (theirs / "systems" / name).write_text(json.dumps(PUBLISHED), encoding="utf-8")
    package = tmp_path / "llm-analysis" / "llm_analysis"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "config.py").write_text(CONFIG, encoding="utf-8")
    (package / "analysis.py").write_text(ANALYSIS, encoding="utf-8")
    yield tmp_path
    for name in ("calculon", "calculon.llm", "calculon.llm.llm"):
        sys.modules.pop(name, None)
    for name in ("llm_analysis", "llm_analysis.config", "llm_analysis.analysis"):
        sys.modules.pop(name, None)


ARGUMENTS = ("--predict", "--measured", str(MEASURED), "--workers", "1")


def test_all_are_judged_on_the_same_runs(clones, capsys):
    """A run that Calculon refuses counts for none where it is compared, and its reason is told."""
    clean = [run for run in read_runs([MEASURED])[0] if run.step_time_s and is_clean(run)]
    small = np.array([run.step_time_s for run in clean if run.config.mbs != REFUSED_MBS])

    assert main([*ARGUMENTS, "--peers", str(clones), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    beside = found["beside"]
    models = {tuple(part["models"]): part for part in beside["on"]}
    ours = found["predicted"][0]

    assert list(models) == [
        ("Meshtune", "Calculon"),
        ("Meshtune", "llm-analysis"),
        ("Meshtune", "Calculon", "llm-analysis"),
    ]
    narrow = models["Meshtune", "Calculon"]["sources"]["ultrascale-playbook"]
    assert {name: figures["n"] for name, figures in narrow.items()} == {"Meshtune": len(small), "Calculon": len(small)}
    assert narrow["Calculon"]["median_ape"] == pytest.approx(np.median(np.abs(PREDICTED_S / small - 1)))
    assert "covered_68" in narrow["Meshtune"]
    assert "covered_68" not in narrow["Calculon"]
    wide = models["Meshtune", "llm-analysis"]["sources"]["ultrascale-playbook"]
    assert {key: ours[key] for key in wide["Meshtune"]} == wide["Meshtune"]
    assert wide["llm-analysis"]["n"] == len(clean)
    assert models["Meshtune", "Calculon", "llm-analysis"]["all"]["llm-analysis"]["n"] == len(small)
    assert sum(beside["left_out"]["Calculon"].values()) == beside["left_out"]["Calculon"]["its own words: too large"]
    assert (found["tuned"], beside["left_out"]["llm-analysis"]) == ([], {})


def test_the_tables_name_every_model(clones, capsys):
    """Without --json each source has one line per model, and what is expressed nearly is told."""
    assert main([*ARGUMENTS, "--peers", str(clones)]) == 0
    text = capsys.readouterr().out

    assert all(f"ultrascale-playbook, {name} " in text for name in ("Meshtune", "Calculon", "llm-analysis"))
    assert "Calculon expresses nearly: " in text
    assert "vocabulary (" in text


def test_a_folder_without_a_clone_is_refused_before_any_fit(tmp_path, capsys):
    """The message names both repositories, and exit status 2 tells a mistake in the arguments."""
    assert main([*ARGUMENTS, "--peers", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert "must hold a clone" in error
    assert "git clone https://github.com/calculon-ai/calculon; git clone https://github.com/cli99/llm-analysis" in error


def test_a_missing_library_of_a_clone_is_named(clones, capsys):
    """A clone that cannot be imported is no crash: the message says what is missing."""
    (clones / "llm-analysis" / "llm_analysis" / "analysis.py").write_text("import no_such_library", encoding="utf-8")

    assert main([*ARGUMENTS, "--peers", str(clones)]) == 2
    assert "cannot be imported (No module named 'no_such_library')" in capsys.readouterr().err
