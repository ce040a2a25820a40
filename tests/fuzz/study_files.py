"""Targets: study files, and what they name: clusters, models, profiles, and the texts of options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from costmodels.calibration.measured_runs import COLUMNS, read_measured_and_skipped
from costmodels.calibration.stated_setup import STATED_COLUMNS
from costmodels.job.model_catalog import read_model_file
from costmodels.job.parallel_config import parse_config
from costmodels.job.runtime import read_profile
from costmodels.sharding.device_mesh import mesh_of
from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.io.config_file import read_mapping
from hardware.price_file import read_prices
from hardware.trace_file import read_trace
from tests.fuzz.mutation import of_json, of_lines, of_table, of_yaml
from tests.fuzz.target import Target
from tests.support.studies.broken_studies import CONFIG_JSON, REPLAY, rows, study
from tuner.cli.options import number, whole_number
from tuner.forecast.sizes import parse_clusters
from tuner.place.operators.graph_file import read_operator_placement
from tuner.place.placement_file import read_placement
from tuner.space.enumeration import enumerate_space
from tuner.storage.history.published import read_published
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.study_file.sequence_keys import SequenceKeys, read_sequences

ROOT = Path(__file__).parents[2]

CLUSTERS = (
    b"{name: dgx-h100, hosts: 4, devices_per_host: 4}\n",
    b"device: H100-SXM-80\nhosts: 2\nswitch: {hosts: 1, uplink_gb_per_s: 200}\ntrace: trace.csv\n",
    b"name: two kinds\ngroups:\n- {name: dgx-h100, hosts: 1}\n- {device: A100-SXM-80, hosts: 2, devices_per_host: 4}\n"
    b"inter_group_links: [{kind: infiniband, bandwidth_gb_per_s: 25, latency_us: 5}]\n",
    b"device: A100-SXM-80\nhosts: 1\nintra_links: [{kind: nvlink, bandwidth_gb_per_s: 300, latency_us: 2,\n"
    b"  mesh_peers: 3, efficiency: 0.8, exclusive_group: a}]\n"
    b"nic_links: [{kind: roce, bandwidth_gb_per_s: 10, latency_us: 9, sharers: 2}]\n",
)

STUDIES = (
    study().encode(),
    study(REPLAY).encode(),
    study(objective="[step_time, cost_per_token]", cost="{price_per_device_hour: 2}").encode(),
    b"""name: all-keys
model: mixtral-8x7b
cluster: {name: dgx-h100, hosts: 4}
job: {sequence_length: 4096, global_batch_size: 64, precision: fp8, optimizer: adam, recompute: selective,
  zero_stage: 1, sequence_parallel: true, recompute_modules: [core_attn, mlp], expert_tp: 1, dp_shard: 0}
runtime: megatron-core
space: {rules: megatron, without: [], memory_headroom: 0.08, pp: [1, 2, 4], tp: [1, 2], mbs: [1, 2],
  recompute: [none, full], offload: [none], zero_stage: [0, 1], sequence_parallel: [true], expert_tp: [0, 1],
  assignment: []}
planner: {name: descent, pins: [{op: "*.up", dim: ffn, axis: tp, weight_s: 0.1}]}
search: {draws: 50, confidence: 0.9, tolerance: 0.02, max_trials: 30, max_minutes: 1, budget_device_hours: 4,
  parallel_trials: 2, seed: 3, prune: false, repeats: 1, acquisition: ucb, baseline: true, placement_wait_s: 5}
current: {pp: 2, tp: 2, dp: 8, ep: 2, mbs: 1}
trial: {backend: simulated, fidelity: simulator, seed: 1, noise: 0.01, num_steps: 3, time_limit: 10,
  proxy: {hosts: 1, layers: auto, full_trials: 5}}
storage: sqlite:///x.db
history: [rows.csv]
cost: {price_per_device_hour: 2.5, currency: EUR, idle_hosts: released}
limits: {tokens: 1e12, max_days: 30, max_cost: 200000, free_memory: 0.08}
""",
    b"""name: knobs
model: llama3-8b
cluster: {name: dgx-h100, hosts: 1}
job: {sequence_length: 8192, global_batch_size: 64}
runtime: megatron-core
space:
  knobs: [tp_comm_overlap, {catalog: ddp_bucket_size, values: [40000000, 200000000], today: 40000000},
    {name: a, flag: --a, when: tp > 1, affects: [tp communication, memory]},
    {name: b, range: {first: 1, last: 64, factor: 2}, today: 4, environment: B, when: a == true and recompute == none},
    {name: c, values: [x, null, 1.5], flag: {x: --c x, \'1.5\': "--c 'y z'"}}]
trial: {backend: command, command: [python, "{knobs}"], flags: null, launch: once}
""",
    b"""name: sequences
model: llama3-8b
cluster: {name: dgx-h100, hosts: 1}
job: {sequence_length: 8192, global_batch_tokens: 524288,
  sequences: {lengths: [512, 2048, 8192], shares: [6, 3, 1], layout: packed, order: balanced}}
runtime: megatron-core
trial: {backend: simulated}
""",
    b"""name: own
model: ./model.yaml
cluster: {file: cluster.yaml, trace: trace.csv}
job: {sequence_length: 2048, global_batch_size: 32}
runtime: ./profile.yaml
trial: {backend: command, command: [torchrun, train.py, "{flags}", --out, "{profile}"], flags: megatron,
  environment: {A: b, C: null}, log: {pattern: ["step (?P<step_ms>[0-9.]+)"]}, launch: once, warmup_steps: 1, steps: 2,
  logs: logs, profile: "traces/{trial}", hang_limit_s: 3}
""",
    b"""name: torch
model: ./config.json
cluster: {device: cpu-core, hosts: 2, devices_per_host: 4}
job: {sequence_length: 64, global_batch_size: 16, precision: fp32}
runtime: torch-reference
trial: {backend: torch, device: cpu, clock: virtual, min_steps: 2, max_steps: 4, precision: 0.1, profile: false}
""",
    b"""name: torch-planned
model: ./config.json
cluster: {device: cpu-core, hosts: 2, devices_per_host: 4}
job: {sequence_length: 64, global_batch_size: 16, precision: fp32, zero_stage: 1}
runtime: torch-planned
planner: {name: descent}
trial: {backend: torch, device: cpu, clock: virtual, min_steps: 2, max_steps: 4, precision: 0.1, profile: false}
""",
    b"""name: jax
model: ./config.json
cluster: {device: cpu-core, hosts: 2, devices_per_host: 4}
job: {sequence_length: 64, global_batch_size: 16, precision: fp32}
runtime: jax-reference
trial: {backend: jax, clock: cpu, min_steps: 2, max_steps: 4, precision: 0.1}
""",
)

TRACE = b"time_s,link,share\n0,intra,0.5\n1,h0-h1,0.1\n2,h1,lost\n3,h1,back\n4,inter,1\n5,infiniband,0.25\n"

MODEL = b"""source: made up
num_layers: 4
hidden_size: 512
vocab_size: 32000
tied_embeddings: false
norm: rms
num_heads: 8
num_kv_heads: 8
head_dim: 64
ffn_size: 1024
gated_ffn: true
num_experts: 8
top_k: 2
expert_ffn_size: 256
num_shared_experts: 1
shared_expert_ffn_size: 256
"""


def _read_space(data: bytes, folder: Path) -> None:
    """As far as the candidates, which a study may have millions of."""
    config = _read_study(data, folder)
    if not config.problem.subject.rows:
        enumerate_space(config.problem.setting, config.problem.options)


def _read_study(data: bytes, folder: Path) -> StudyRequest:
    return load_study(_written(_beside(folder) / "study.yaml", data))


def _read_placement(data: bytes, folder: Path) -> None:
    path = _written(_beside(folder) / "placement.yaml", data)
    mapping = read_mapping(path)
    if "graphs" in mapping:
        read_operator_placement(mapping, path)
    else:
        read_placement(path)


def _read_lengths(path: Path) -> None:
    read_sequences(SequenceKeys(lengths=path.name), path.parent)


def _read_trace(path: Path) -> None:
    read_trace(path, find_cluster("dgx-h100", 8)).events[:1]


def _read_cluster(path: Path) -> None:
    cluster_from_mapping(read_mapping(path), path.parent)


def _read_model(path: Path) -> None:
    """As every command asks a model."""
    model = read_model_file(path)
    assert model.num_parameters > 0
    assert model.model_flops_per_token(4096) > 0


def _read_measured(path: Path) -> None:
    read_measured_and_skipped([path], path.parent)
    read_published(path)


def _read_override(data: bytes, folder: Path) -> None:
    path = folder / "good.yaml"
    if not path.exists():
        _written(path, STUDIES[0])
    load_study(path, overrides=[_text(data)])


def _read_number(text: str) -> None:
    number("--until", text)
    whole_number("--trials", text, 1)


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Reads an input from a file of this name."""
    return lambda data, folder: read(_written(folder / name, data))


def _argument(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    """Reads an input as a text of the command line."""
    return lambda data, _folder: read(_text(data))


def _text(data: bytes) -> str:
    """An argument as Python hands it over, which is not always Unicode."""
    return data.decode(errors="surrogateescape")


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _beside(folder: Path) -> Path:
    """The folder, with the files that studies name."""
    if not (folder / "rows.csv").exists():
        (folder / "model.yaml").write_bytes(MODEL)
        (folder / "config.json").write_text(CONFIG_JSON, encoding="utf-8")
        (folder / "cluster.yaml").write_bytes(CLUSTERS[0])
        (folder / "trace.csv").write_bytes(TRACE)
        (folder / "profile.yaml").write_bytes((ROOT / "costmodels/catalog/runtimes/megatron-core.yaml").read_bytes())
        (folder / "rows.csv").write_text(rows({}, {"tp": 4, "dp": 2}), encoding="utf-8")
    return folder


def _files(*patterns: str) -> tuple[bytes, ...]:
    """The files of the repository, the smallest first."""
    found = sorted({path for pattern in patterns for path in ROOT.glob(pattern)}, key=lambda path: path.stat().st_size)
    return tuple(path.read_bytes() for path in found[:20])


def _studies() -> tuple[bytes, ...]:
    return (*STUDIES, *_files("configs/studies/flexparallel/*.yaml")[:6])


def _models() -> tuple[bytes, ...]:
    return (MODEL, *_files("costmodels/catalog/models/*.yaml")[:6])


def _profiles() -> tuple[bytes, ...]:
    return _files("costmodels/catalog/runtimes/*.yaml")[:4]


def _measured() -> tuple[bytes, ...]:
    """Good rows, and a few of each file."""
    files = _files("configs/measured/*.csv")
    stating = {
        "link": "roce",
        "nic_gb_per_s": 12.5,
        "attention": "flash",
        "facts": "overlaps_ring=true; gradient_bytes=2",
    }
    stated = rows({}, stating, columns=(*COLUMNS, *STATED_COLUMNS))
    return (
        rows({}, {"tp": 4, "dp": 2}).encode(),
        stated.encode(),
        *(b"".join(file.splitlines(keepends=True)[:6]) for file in files),
    )


CONFIGURATIONS = (
    b"pp=4,tp=2,mbs=1,offload=optimizer,zero_stage=1,sequence_parallel=true,recompute=full,expert_tp=1,dp_shard=2",
    b"layers=20x3/18,micro_batches=4/2,hosts=0-3/5,recomputed=1x4",
)
PLACEMENTS = (
    b"""name: all-keys
cluster: {name: dgx-h100, hosts: 2}
runtime: ./profile.yaml
memory_headroom: 0.1
overlap_steps: 1
pools: true
together: [[actor, critic]]
apart: [[rollout, actor]]
modules:
  rollout: {job: generate, model: ./model.yaml, prompts: 8, responses_per_prompt: 2, prompt_tokens: 64,
    response_tokens: 64, longest_response_tokens: 128, layout: {tp: 2}, devices: 4}
  actor: {job: train, model: ./model.yaml, sequence_length: 128, global_batch_size: 16, optimizer_steps: 2,
    optimizer: sgd, precision: fp8, layout: {pp: 1, mbs: 1}}
  logprobs: {job: infer, shares: actor, sequence_length: 128, global_batch_size: 16}
  critic: {job: train, model: llama3-8b, sequence_length: 128, global_batch_size: 16, runtime: torchtitan}
flow:
- {source: rollout, target: logprobs, sends: tokens}
- {source: logprobs, target: actor, sends: logprobs}
- {source: actor, target: rollout, sends: weights}
""",
    b"""name: all-keys-of-operators
cluster: {groups: [{name: rtx4090d, devices_per_host: 2}, {name: v100-pcie, devices_per_host: 1}]}
memory_headroom: 0.1
precision: fp16
links:
- {devices: [0, 1], kind: nvlink, bandwidth_gb_per_s: 50, latency_us: 2, exclusive_group: a, mesh_peers: 2, sharers: 2}
- {devices: [0, 2], kind: pcie, bandwidth_gb_per_s: 16, latency_us: 2, exclusive_group: a, efficiency: 0.5, port: b}
graphs:
  one:
    weight: 2
    operators:
      a: {tflop: 1, moved_gib: 2, memory_gib: 1, splits: [{parts: 2, gather_gib: 0.5}, {parts: 3}]}
      b: {tflop: 1, inputs_gib: {a: 0.5}}
      c: {seconds: {RTX4090D: 0.5, V100-PCIe-32: 1}, inputs_gib: {b: 0.5}, same_device_as: a}
    fusions:
    - {first: a, second: b, moved_gib: 1, memory_gib: 2}
    - {first: b, second: c, seconds: {RTX4090D: 0.5}}
  two: {model: {name: ./model.yaml, job: train, sequence_length: 128, sequences: 2, micro_batches: 2, pieces: 2}}
""",
    b"""cluster: {file: cluster.yaml}
modules:
  encoder: {job: train, model: ./config.json, sequence_length: 256, global_batch_size: 16}
  language: {job: train, model: llama3-8b, sequence_length: 512, global_batch_size: 16}
flow: [{source: encoder, target: language, sends: embeddings, tokens: 64}]
""",
)
LENGTHS = (b"length,count\n512,6\n2048,3\n8192,1\n", b"length\n512\n512\n2048\n")
OVERRIDES = (b"search.seed=3", b"cluster={name: dgx-h100, hosts: 2}", b"space.tp=[1, 2]", b"job.precision=fp8")


TARGETS = tuple(
    Target(name=name, read=read, mutation=mutation, seeds=seeds)
    for name, read, mutation, seeds in (
        ("yaml", _file("input.yaml", read_mapping), of_yaml, _studies),
        ("json", _file("input.json", read_mapping), of_json, lambda: _files("configs/models/*.json")),
        ("study", _read_study, of_yaml, _studies),
        ("space", _read_space, of_yaml, _studies),
        ("cluster", _file("cluster.yaml", _read_cluster), of_yaml, lambda: CLUSTERS),
        ("model", _file("model.yaml", _read_model), of_yaml, _models),
        ("config.json", _file("config.json", _read_model), of_json, lambda: _files("configs/models/*.json")),
        ("profile", _file("profile.yaml", read_profile), of_yaml, _profiles),
        ("measured", _file("rows.csv", _read_measured), of_table, _measured),
        ("placement", _read_placement, of_yaml, lambda: PLACEMENTS),
        ("trace", _file("trace.csv", _read_trace), of_table, lambda: (TRACE, *_files("configs/traces/*.csv"))),
        ("prices", _file("prices.yaml", read_prices), of_yaml, lambda: _files("configs/prices/*.yaml")),
        ("clusters", _argument(parse_clusters), of_lines, lambda: (b"dgx-h100,gb200", b"l20")),
        ("lengths", _file("lengths.csv", _read_lengths), of_table, lambda: LENGTHS),
        ("configuration", _argument(lambda text: parse_config(text, {})), of_lines, lambda: CONFIGURATIONS),
        (
            "mesh",
            _argument(lambda text: mesh_of(text, find_cluster("dgx-h100", 2))),
            of_lines,
            lambda: (b"data=2,model=4", b"a=1,b=8,c=2"),
        ),
        ("override", _read_override, of_lines, lambda: OVERRIDES),
        ("number", _argument(_read_number), of_lines, lambda: (b"3", b"17")),
    )
)
