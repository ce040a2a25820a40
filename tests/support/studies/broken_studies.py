"""Invalid study files, each with the words that its error message must contain.

`CASES` is shared by the tests of `load_study` and of the command line.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from costmodels.calibration.measured_runs import COLUMNS

MISSING = "(no such file)"
DIRECTORY = "(a directory)"

GOOD = {
    "name": "broken",
    "model": "llama3-8b",
    "cluster": "{name: dgx-h100, hosts: 1}",
    "job": "{sequence_length: 4096, global_batch_size: 16}",
}

REPLAY = {"name": "broken", "cluster": "{name: dgx-h100, hosts: 1}", "trial": "{backend: replay, measured: [rows.csv]}"}

(ROW,) = csv.DictReader(
    (
        "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gbs,mbs,devices,device,tp,pp,vpp,cp,up,ep,dp,"
        "recompute,zero_stage,seq_parallel,precision,step_seconds",
        "made up,llama-8B,32,4096,32,8,14336,128256,4096,16,1,8,H100-SXM-80,8,1,1,1,1,1,1,none,1,1,bf16,1.5",
    )
)
"""Cells of a measured run, by column."""

CONFIG_JSON = (
    '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000, '
    '"intermediate_size": 11008, "num_attention_heads": 32}'
)


@dataclass(frozen=True, kw_only=True)
class BrokenStudy:
    """Study file with one mistake.

    Attributes:
        id: Name of the mistake in test reports.
        text: Content of the study file, or MISSING or DIRECTORY.
        words: Required words of the message: the file, the key with its value, the rule, the nearest valid choice.
        files: Content of other files beside the study, by name.
    """

    id: str
    text: str | bytes
    words: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the study and the files that it names into `folder`, and return the path of the study."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        path = folder / "study.yaml"
        if self.text == DIRECTORY:
            path.mkdir()
        elif self.text != MISSING:
            path.write_bytes(self.text if isinstance(self.text, bytes) else self.text.encode())
        return path


def study(keys: dict[str, str] = GOOD, **changes: str | None) -> str:
    """Return the text of a study file: `keys` with `changes`, where None removes a key."""
    lines = {**keys, **changes}
    return "".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None)


def rows(*changes: dict[str, object], columns: tuple[str, ...] = COLUMNS) -> str:
    """Return a CSV file of measured runs: ROW with each of `changes`."""
    lines = [",".join(str({**ROW, **change}.get(column, "")) for column in columns) for change in changes]
    return "\n".join([",".join(columns), *lines]) + "\n"


def changed(keys: dict[str, str], change: str) -> str:
    """Return a study of `keys` in which `change` sets others, as `KEY: VALUE; KEY: VALUE`, or removes one, as `no KEY`.

    Three dots stand for the job of GOOD.
    """
    changes: dict[str, str | None] = {}
    for each in change.replace("...", GOOD["job"][1:-1]).split("; "):
        key, _, value = each.partition(":")
        changes |= {key.removeprefix("no "): None} if key.startswith("no ") else {key: value.strip()}
    return study(keys, **changes)


def cases(table: str, *words: str, keys: dict[str, str] = GOOD, file: str = "", content: str = "") -> list[BrokenStudy]:
    """Read a table of mistakes: in each line a change of `keys`, an arrow, and words of the message between bars."""
    files = {file: content} if file else {}
    lines = [line.split(" -> ") for line in table.strip().splitlines()]
    return [
        BrokenStudy(id=change, text=changed(keys, change), words=(*words, *told.split(" | ")), files=files)
        for change, told in lines
    ]


IN_ONE_STUDY = """
3: x -> line 5 | a key must be text
name: !!python/object/apply:os.system [ls] -> line 1 | is not valid YAML
job: {sequence_length: 4096, -> line 5 | is not valid YAML
cluster: {name: l20, hosts: 1, hosts: 2} -> hosts | appears twice
modle: gpt-13b -> modle: unknown key | did you mean 'model'?
job: {sequence_lenght: 4096, global_batch_size: 16} -> job.sequence_lenght = 4096 | unknown key | 'sequence_length'?
cluster: {name: dgx-h100, host: 1} -> cluster.host = 1 | unknown key | did you mean 'hosts'?
cluster: {groups: [{name: dgx-h100}, {name: l20, nodes: 2}]} -> cluster.groups.1.nodes = 2 | unknown key
space: {fsdp: [2]} -> space.fsdp: unknown key | zero_stage
search: {trials: 3} -> search.trials = 3 | unknown key | max_trials
trial: {backend: simulated, steps: 3} -> trial.steps = 3 | unknown key | num_steps
trial: {backend: simulated, measured: [a.csv]} -> trial.measured: unknown key
current: {tp: 8, sp: 2} -> current.sp = 2 | unknown key | valid: pp
no name -> name | is required and missing
no model -> model | is required and missing
no cluster -> cluster | is required and missing
no job -> job | is required and missing
job: {sequence_length: 4096} -> job.global_batch_size | is required and missing
trial: {seed: 3} -> trial.backend | is required and missing
cluster: {hosts: 2} -> cluster | needs `name`, `device`
job: {sequence_length: "4096", global_batch_size: 16} -> job.sequence_length = '4096' | must be a whole number
job: {sequence_length: 4096, global_batch_size: true} -> job.global_batch_size = True | must be a whole number
search: {max_trials: 4.5} -> search.max_trials = 4.5 | a whole number
cluster: {name: l20, hosts: 2.0} -> cluster.hosts = 2.0 | must be a whole number
space: {memory_headroom: 8%} -> space.memory_headroom = '8%' | a number
model: 8 -> model = 8 | must be text
job: [4096, 16] -> job = [4096, 16] | must be a mapping
cluster: dgx-h100 -> cluster = 'dgx-h100' | must be a mapping
current: tp=8 -> current = 'tp=8' | must be a mapping
space: {tp: {min: 1}} -> space.tp = {'min': 1} | must be a list
space: {without: heads} -> space.without = 'heads' | must be a list
space: {sequence_parallel: [1]} -> space.sequence_parallel.0 = 1 | true or
job: {..., sequence_parallel: yes} -> 'yes' | true or false
search: null -> search | must be a mapping, but is empty (null)
name: -> name | must be text, but is empty (null)
space: {tp: [1, two]} -> space.tp.1 = 'two' | must be a whole number
current: {tp: 8.0} -> current.tp = 8.0 | must be a whole number of at least 1
current: {tp: 8, pp: true} -> current.pp = True | must be a whole number
model: llama3-9b -> model = 'llama3-9b' | catalog | did you mean 'llama3-8b'?
cluster: {name: dgx-h10} -> cluster.name = 'dgx-h10' | is not a known cluster | did you mean 'dgx-h100'?
cluster: {device: H1000} -> cluster.device = 'H1000' | is not a known device
cluster: {file: cluster.yaml} -> cluster.yaml | no such file
cluster: {name: dgx-h100, trace: net.csv} -> cluster.trace: | net.csv: no such file
runtime: ours.yaml -> runtime: | ours.yaml: no such file
runtime: megatron -> runtime = 'megatron' | is no runtime profile | did you mean 'megatron-core'?
runtime: nanotron; job: {..., expert_tp: 1} -> job.expert_tp = 1 | is not offered by the runtime nanotron
runtime: nanotron; job: {..., recompute: selective} -> job.recompute = 'selective' | nanotron | valid: none, full
runtime: nanotron; space: {zero_stage: [1, 3]} -> space.zero_stage = 3 | by the runtime nanotron | valid: 0, 1
space: {zero_stage: [4]} -> space.zero_stage.0 = 4 | less than or equal to 3
space: {tp: [3]} -> space.tp = [3] | the cluster's 8 devices | valid: 1, 2, 4, 8
space: {mbs: [5, 7]} -> space.mbs = [5, 7] | global batch of 16 | valid: 1, 2,
space: {ep: [2]} -> space.ep = [2] | must be 1 without experts | valid: 1
space: {tp: []} -> space.tp = [] | at least one value, each once
space: {tp: [1, 2, 2]} -> space.tp = [1, 2, 2] | at least one value, each once
space: {tp: [0, 1]} -> space.tp.0 = 0 | greater than or equal to 1
space: {rules: flex} -> space.rules = 'flex' | 'flexparallel'?
space: {without: [head]} -> space.without = 'head' | did you mean 'heads'?
space: {without: [devices]} -> 'devices' | switched off
space: {recompute: [some]} -> space.recompute.0 = 'some' | 'selective' or
space: {memory_headroom: 1.5} -> space.memory_headroom = 1.5 | less than 1
job: {..., recompute_modules: [core_atn]} -> job.recompute_modules = 'core_atn' | did you mean 'core_attn'?
job: {..., dp_shard: -1} -> job.dp_shard = -1 | greater than or
job: {..., precision: int4} -> job.precision = 'int4' | 'bf16'
job: {..., precision: fp8}; cluster: {name: dgx-a100} -> job.precision = 'fp8' | no known peak on A100-SXM-80 | bf16
job: {..., optimizer: adan} -> optimizer = 'adan' | 'adam'
job: {sequence_length: -4096, global_batch_size: 16} -> job.sequence_length = -4096 | must be greater
job: {sequence_length: 4096, global_batch_size: 0} -> job.global_batch_size = 0 | must be greater
cluster: {name: dgx-h100, hosts: 0} -> cluster.hosts = 0 | greater than or equal to 1
cluster: {name: dgx-h100, hosts: 999999} -> cluster.hosts | 7999992 devices
cluster: {name: dgx-h100, devices_per_host: 9} -> cluster.devices_per_host = 9 | a dgx-h100 host has 8 devices
search: {tolerance: 1} -> search.tolerance = 1 | less than 1
search: {confidence: 0} -> search.confidence = 0 | greater than 0
search: {confidence: .nan} -> search.confidence = nan | must be
search: {draws: 1} -> search.draws = 1 | greater than or equal to 10
search: {max_trials: 0} -> search.max_trials = 0 | greater than or equal to 1
search: {seed: -1} -> search.seed = -1 | greater than or equal to 0
search: {budget_device_hours: 0} -> search.budget_device_hours = 0 | greater than 0
search: {max_minutes: 0} -> search.max_minutes = 0 | greater than 0
search: {max_seconds: 60} -> search.max_seconds = 60 | earlier versions | max_minutes, in minutes
trial: {backend: simulated, time_limit_s: 60} -> trial.time_limit_s = 60 | earlier versions | time_limit
trial: {backend: simulated, time_limit: soon} -> trial.time_limit = 'soon' | 30:00, 1:30:00 or 2-00:00:00
trial: {backend: simulated, time_limit: 0} -> trial.time_limit = 0 | greater than 0
trial: {backend: simulated, time_limit: 00:00} -> trial.time_limit = '00:00' | greater than 0
trial: {backend: slurm} -> trial.backend = 'slurm' | replay, simulated
trial: {backend: simulated, fidelity: exact} -> trial.fidelity = 'exact'
trial: {backend: simulated, noise: -1} -> trial.noise = -1 | greater than or equal to 0
trial: {backend: torch} -> runtime = 'megatron-core' | runtime: torch-reference
trial: {backend: jax} -> runtime = 'megatron-core' | runtime: jax-reference
trial: {backend: simulated, proxy: {hosts: 1}} -> trial.proxy.hosts = 1 | than the 1 hosts | leave proxy out
name: a/b -> name = 'a/b' | letters, digits, dots, dashes and underscores
storage: meshtune.db -> storage = 'meshtune.db' | not a database URL | sqlite:///
history: a.csv -> history = 'a.csv' | must be a list
history: [3] -> history.0 = 3 | must be text
history: [old.db] -> history.0 = 'old.db' | neither a database URL nor
history: ['s3://a/b.csv'] -> history.0 = 's3://a/b.csv' | not a database URL
history: ['sqlite:///no.db'] -> history.0 = 'sqlite:///no.db' | no such database
history: ['sqlite://'] -> history.0 = 'sqlite://' | no such database
history: [runs.csv] -> history.0 | runs.csv | no such file
current: {tp: 8, dp: 8} -> current = 'pp=1,tp=8,dp=8,cp=1,up=1,vpp=1,ep=1,mbs=1' | must be the 8 devices
current: {tp: 8, recompute: half} -> current.recompute = 'half' | must be none, selective or full
current: {tp: 8, mbs: 0} -> current.mbs = 0 | must be a whole number of at least 1
current: {tp: 8, mbs: 3} -> current | mbs=3 | dp*mbs must divide | 16 sequences
current: {dp: 8, ep: 2} -> current | ep=2 | ep must divide
current: {tp: 2, dp: 4, ep: 8}; model: mixtral-8x7b -> current | ep=8 | must divide tp*dp*cp*up
current: {pp: 64}; cluster: {name: l20, hosts: 8} -> pp=64 | layers
current: {tp: 8, zero_stage: 0} -> current.zero_stage = 0 | the study fixes zero_stage to 1 | space.zero_stage
"""

ON_FOUR_HOSTS = """
trial: {backend: simulated, proxy: {layers: 4}} -> trial.proxy.hosts | is required and missing
trial: {backend: simulated, proxy: {hosts: 1, devices: 8}} -> trial.proxy.devices = 8 | unknown key
trial: {backend: simulated, proxy: 2} -> trial.proxy = 2 | must be a mapping
trial: {backend: simulated, proxy: {hosts: 0}} -> trial.proxy.hosts = 0 | greater than or equal to 1
trial: {backend: simulated, proxy: {hosts: 4}} -> trial.proxy.hosts = 4 | fewer than the 4 hosts | at most 3
trial: {backend: simulated, proxy: {hosts: 1, layers: 33}} -> trial.proxy.layers = 33 | from 1 to the 32 layers
trial: {backend: simulated, proxy: {hosts: 1, layers: few}} -> trial.proxy.layers = 'few' | auto
trial: {backend: simulated, proxy: {hosts: 1, layers: 0}} -> trial.proxy.layers = 0 | auto or a whole number
trial: {backend: simulated, proxy: {hosts: 1, full_trials: 40}} -> trial.proxy.full_trials = 40 | at most 39
cluster: {groups: [{name: dgx-h100}, {name: dgx-a100}]}; trial: {backend: simulated, proxy: {hosts: 1}} -> equal hosts
"""

OF_TORCH = """
trial: {backend: torch, min_steps: 30} -> trial.max_steps = 20 | at least min_steps, which is 30
trial: {backend: torch, clock: virtual} -> trial.clock = 'virtual' | clock: wall
trial: {backend: torch, clock: sundial} -> trial.clock = 'sundial'
trial: {backend: torch}; planner: {name: descent} -> planner.name = 'descent' | runtime: torch-planned
trial: {backend: torch}; model: deepseek-v3 -> deepseek-v3 | latent attention
trial: {backend: torch}; job: {..., precision: fp8} -> job.precision = 'fp8' | valid: fp32, bf16
"""

OF_TORCH_PLANNED = """
trial: {backend: torch} -> cluster = 'dgx-h100' | cannot run sharding plans | cpu-host
trial: {backend: torch}; cluster: {name: cpu-host}; job: {..., precision: bf16} -> job.precision = 'bf16' | valid: fp32
trial: {backend: torch}; cluster: {name: cpu-host}; model: deepseek-v3 -> deepseek-v3 | latent attention
trial: {backend: torch, capacity_factor: 2}; cluster: {name: cpu-host} -> trial.capacity_factor = 2 | leave it out
"""

OF_JAX = """
trial: {backend: jax, min_steps: 30} -> trial.max_steps = 20 | at least min_steps, which is 30
trial: {backend: jax, clock: sundial} -> trial.clock = 'sundial' | auto
trial: {backend: jax} -> cluster = 'dgx-h100' | cannot train on | cpu-host
trial: {backend: jax}; cluster: {name: cpu-host}; job: {..., precision: fp16} -> job.precision = 'fp16' | fp32, bf16
trial: {backend: jax}; cluster: {name: cpu-host}; model: deepseek-v3 -> deepseek-v3 | latent attention | backend: torch
"""

OF_A_REPLAY = """
model: llama3-8b -> model = 'llama3-8b' | takes its model and job from the measured rows | leave model out
job: {...} -> job | leave job out
cluster: {name: dgx-h100, hosts: 2} -> cluster = {'name': 'dgx-h100', 'hosts': 2} | and the cluster has 16
trial: {backend: replay, measured: [rows.csv], proxy: {hosts: 1}} -> trial.proxy | the backend replay | leave proxy out
trial: {backend: replay, measured: [rows.csv], where: {batch: 16}} -> where.batch | is no column of the file
trial: {backend: replay, measured: [rows.csv], where: {gbs: [16]}} -> trial.where.gbs = [16]
trial: {backend: replay, measured: []} -> trial.measured = [] | at least 1
trial: {backend: replay, measured: [none.csv]} -> none.csv | no such file
"""

OF_A_REPLAY_OF_TWO_JOBS = """
trial: {backend: replay, measured: [rows.csv]} -> trial.where | 2 values of `gbs` | 16, 32
trial: {backend: replay, measured: [rows.csv], where: {gbs: 64}} -> where.gbs = 64 | matches no row | 16, 32
"""

CASES = [
    *cases(IN_ONE_STUDY, "study.yaml"),
    *cases(ON_FOUR_HOSTS, "study.yaml", "trial.proxy", keys=GOOD | {"cluster": "{name: dgx-h100, hosts: 4}"}),
    *cases(OF_TORCH, "study.yaml", keys=GOOD | {"runtime": "torch-reference"}),
    *cases(OF_TORCH_PLANNED, "study.yaml", keys=GOOD | {"runtime": "torch-planned"}),
    *cases(OF_JAX, "study.yaml", keys=GOOD | {"runtime": "jax-reference"}),
    *cases(OF_A_REPLAY, keys=REPLAY, file="rows.csv", content=rows({})),
    *cases(OF_A_REPLAY_OF_TWO_JOBS, keys=REPLAY, file="rows.csv", content=rows({}, {"gbs": 32, "mbs": 2})),
    *cases("runtime: ./o.yaml -> runtime: | o.yaml: sources", file="o.yaml", content="rule_set: megatron\n"),
    *cases("history: [a.csv, a.csv] -> history.1 = 'a.csv' | named twice", file="a.csv", content=rows({})),
    *cases("model: tiny.yaml -> tiny.yaml | is required and missing", file="tiny.yaml", content="source: made up\n"),
    *cases(
        "cluster: {name: dgx-h100, trace: t.csv} -> cluster.trace: | t.csv:2: link = 'h1': is no host | valid: h0",
        file="t.csv",
        content="time_s,link,share\n60,h1,lost\n",
    ),
    *(
        BrokenStudy(id=words, text=study(REPLAY), words=tuple(words.split(" | ")), files={"rows.csv": content})
        for words, content in {
            "rows.csv:1 | gbs | is a missing column": rows({}, columns=tuple(c for c in COLUMNS if c != "gbs")),
            "rows.csv:2 | tp = 'eight' | must be a number": rows({"tp": "eight"}),
            "rows.csv:3 | has 2 cells where the header has": rows({}) + "a,b\n",
            "rows.csv | holds no measured run": rows(),
            "where | none of which has a complete and consistent": rows({"tp": ""}, {"dp": 3}),
            "where | rows without a step time": rows({"step_seconds": "", "mfu": 0.4}),
        }.items()
    ),
    *(
        BrokenStudy(id=words, text=study(model=name), words=tuple(words.split(" | ")), files={"llama.json": content})
        for words, name, content in (
            ("lama.json | no such file | did you mean 'llama.json'?", "lama.json", CONFIG_JSON),
            ("llama.json | line 1 | is not valid JSON", "llama.json", CONFIG_JSON[:-1]),
            ("llama.json | model_type = 'lama' | 'llama'?", "llama.json", CONFIG_JSON.replace('"llama"', '"lama"')),
            ("llama.json | num_hidden_layers | missing", "llama.json", CONFIG_JSON.replace("num_hidden_layers", "x")),
        )
    ),
    *(
        BrokenStudy(id=words, text=text, words=("study.yaml", *words.split(" | ")))
        for words, text in {
            "no such file": MISSING,
            "is a directory, not a file": DIRECTORY,
            "must hold a mapping": "",
            "must hold a mapping | but holds a list": "- name: x\n- model: y\n",
            "must hold a mapping | but holds text": "llama3-8b\n",
            "is not valid YAML": study() + "---\nname: other\n",
            "line 3, column 1 | is not valid YAML": "name: x\njob:\n\tsequence_length: 4096\n",
            "name | appears twice in one mapping | line 5 | keep one": study() + "name: again\n",
            "is not UTF-8 text": "name: café\n".encode("latin-1"),
            "line 2 | aliases (*name) are not allowed": "a: &a [x, x]\n" + "b: &b [*a, *a, *a]\n" * 20,
            "nested deeper than 32 levels": "name: " + "[" * 5000 + "]" * 5000 + "\n",
            "larger than 1 MB": "#" * 1_000_001 + "\n" + study(),
        }.items()
    ),
]
