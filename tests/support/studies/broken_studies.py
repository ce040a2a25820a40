"""Invalid study files, each with the words that its error message must contain.

`CASES` is shared by the tests of `load_study` and of the command line.
"""

from __future__ import annotations

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

ROW = {
    "source": "made up",
    "model": "llama-8B",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "seq_len": 4096,
    "gbs": 16,
    "mbs": 1,
    "devices": 8,
    "device": "H100-SXM-80",
    "tp": 8,
    "pp": 1,
    "vpp": 1,
    "cp": 1,
    "up": 1,
    "ep": 1,
    "dp": 1,
    "recompute": "none",
    "zero_stage": 1,
    "seq_parallel": 1,
    "precision": "bf16",
    "step_seconds": 1.5,
}

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


def proxies(keys: str, **changes: str) -> str:
    """Return the text of a study on four hosts with these keys in `proxy`."""
    four_hosts = {"cluster": "{name: dgx-h100, hosts: 4}"}
    return study(trial=f"{{backend: simulated, proxy: {keys}}}", **{**four_hosts, **changes})


def rows(*changes: dict[str, object], columns: tuple[str, ...] = COLUMNS) -> str:
    """Return a CSV file of measured runs: ROW with each of `changes`."""
    lines = [",".join(str({**ROW, **change}.get(column, "")) for column in columns) for change in changes]
    return "\n".join([",".join(columns), *lines]) + "\n"


def broken(name: str, text: str | bytes, *words: str, **files: str) -> BrokenStudy:
    """Build a case with a mistake in study.yaml itself."""
    return BrokenStudy(id=name, text=text, words=("study.yaml", *words), files=files)


def replayed(name: str, csv: str, *words: str, **changes: str | None) -> BrokenStudy:
    """Build a case with a mistake in the measured rows of a replay, or in the keys about them."""
    return BrokenStudy(id=name, text=study(REPLAY, **changes), words=words, files={"rows.csv": csv})


CASES: list[BrokenStudy] = [
    # not a file of keys
    broken("missing file", MISSING, "no such file"),
    broken("directory", DIRECTORY, "is a directory, not a file"),
    broken("empty file", "", "must hold a mapping"),
    broken("only a comment", "# nothing\n", "must hold a mapping"),
    broken("a list", "- name: x\n- model: y\n", "must hold a mapping", "but holds a list"),
    broken("a word", "llama3-8b\n", "must hold a mapping", "but holds text"),
    broken("two documents", study() + "---\nname: other\n", "is not valid YAML"),
    broken("syntax error", study(job="{sequence_length: 4096,"), "line 5", "is not valid YAML"),
    broken("tab", "name: x\njob:\n\tsequence_length: 4096\n", "line 3, column 1", "is not valid YAML"),
    broken("not UTF-8", "name: café\n".encode("latin-1"), "is not UTF-8 text"),
    broken("a tag that runs code", study(name="!!python/object/apply:os.system [ls]"), "line 1", "is not valid YAML"),
    broken(
        "alias bomb",
        "a: &a [x, x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a, *a, *a, *a]\n" for i in range(20)),
        "line 2",
        "aliases (*name) are not allowed",
    ),
    broken("deep nesting", "name: " + "[" * 5000 + "]" * 5000 + "\n", "nested deeper than 32 levels"),
    broken("too large", "#" * 1_000_001 + "\n" + study(), "larger than 1 MB"),
    broken("doubled key", study() + "name: again\n", "name", "appears twice in one mapping", "line 5", "keep one"),
    broken("doubled inner key", study(cluster="{name: l20, hosts: 1, hosts: 2}"), "hosts", "appears twice"),
    broken("a key that is a number", study() + "3: x\n", "line 5", "a key must be text"),
    # unknown and missing keys
    broken("unknown key", study() + "modle: gpt-13b\n", "modle: unknown key", "did you mean 'model'?"),
    broken(
        "unknown key of job",
        study(job="{sequence_lenght: 4096, global_batch_size: 16}"),
        "job.sequence_lenght = 4096",
        "unknown key",
        "did you mean 'sequence_length'?",
    ),
    broken(
        "unknown key of cluster",
        study(cluster="{name: dgx-h100, host: 1}"),
        "cluster.host = 1",
        "unknown key",
        "did you mean 'hosts'?",
    ),
    broken(
        "unknown key of a host group",
        study(cluster="{groups: [{name: dgx-h100}, {name: l20, nodes: 2}]}"),
        "cluster.groups.1.nodes = 2",
        "unknown key",
    ),
    broken("unknown key of space", study(space="{fsdp: [2]}"), "space.fsdp: unknown key", "zero_stage"),
    broken("unknown key of search", study(search="{trials: 3}"), "search.trials = 3", "unknown key", "max_trials"),
    broken(
        "unknown key of trial",
        study(trial="{backend: simulated, steps: 3}"),
        "trial.steps = 3",
        "unknown key",
        "num_steps",
    ),
    broken(
        "key of another backend", study(trial="{backend: simulated, measured: [a.csv]}"), "trial.measured: unknown key"
    ),
    broken(
        "unknown degree of the current configuration",
        study(current="{tp: 8, sp: 2}"),
        "current.sp = 2",
        "unknown key",
        "valid: pp",
    ),
    broken("no name", study(name=None), "name", "is required and missing"),
    broken("no model", study(model=None), "model", "is required and missing"),
    broken("no cluster", study(cluster=None), "cluster", "is required and missing"),
    broken("no job", study(job=None), "job", "is required and missing"),
    broken("no batch", study(job="{sequence_length: 4096}"), "job.global_batch_size", "is required and missing"),
    broken("no backend", study(trial="{seed: 3}"), "trial.backend", "is required and missing"),
    broken("a cluster without a name", study(cluster="{hosts: 2}"), "cluster", "needs `name`, `device`"),
    # wrong types
    broken(
        "text for a number",
        study(job='{sequence_length: "4096", global_batch_size: 16}'),
        "job.sequence_length = '4096'",
        "must be a whole number",
    ),
    broken("number with a unit", study(space="{memory_headroom: 8%}"), "space.memory_headroom = '8%'", "a number"),
    broken("number for text", study(model="8"), "model = 8", "must be text"),
    broken("bool for text", study(name="true"), "name = True", "must be text"),
    broken("list for a mapping", study(job="[4096, 16]"), "job = [4096, 16]", "must be a mapping"),
    broken("text for a mapping", study(cluster="dgx-h100"), "cluster = 'dgx-h100'", "must be a mapping"),
    broken("mapping for a list", study(space="{tp: {min: 1}}"), "space.tp = {'min': 1}", "must be a list"),
    broken("number for a list", study(space="{tp: 2}"), "space.tp = 2", "must be a list"),
    broken("text for a list", study(space="{without: heads}"), "space.without = 'heads'", "must be a list"),
    broken(
        "bool for a whole number",
        study(job="{sequence_length: 4096, global_batch_size: true}"),
        "job.global_batch_size = True",
        "must be a whole number",
    ),
    broken("float for a whole number", study(search="{max_trials: 4.5}"), "search.max_trials = 4.5", "a whole number"),
    broken("whole float", study(cluster="{name: l20, hosts: 2.0}"), "cluster.hosts = 2.0", "must be a whole number"),
    broken("number for a bool", study(space="{sequence_parallel: [1]}"), "space.sequence_parallel.0 = 1", "true or"),
    broken("yes for a bool", study(job=GOOD["job"][:-1] + ", sequence_parallel: yes}"), "'yes'", "true or false"),
    broken("null", study(search="null"), "search", "must be a mapping, but is empty (null)"),
    broken("nothing after a key", study(name=""), "name", "must be text, but is empty (null)"),
    broken("text in a list", study(space="{tp: [1, two]}"), "space.tp.1 = 'two'", "must be a whole number"),
    broken("text for the current configuration", study(current="tp=8"), "current = 'tp=8'", "must be a mapping"),
    broken(
        "float for a degree", study(current="{tp: 8.0}"), "current.tp = 8.0", "must be a whole number of at least 1"
    ),
    broken("bool for a degree", study(current="{tp: 8, pp: true}"), "current.pp = True", "must be a whole number"),
    # names that nothing has
    broken("unknown model", study(model="llama3-9b"), "model = 'llama3-9b'", "catalog", "did you mean 'llama3-8b'?"),
    broken(
        "unknown cluster",
        study(cluster="{name: dgx-h10, hosts: 1}"),
        "cluster.name = 'dgx-h10'",
        "is not a known cluster",
        "did you mean 'dgx-h100'?",
    ),
    broken("unknown device", study(cluster="{device: H1000}"), "cluster.device = 'H1000'", "is not a known device"),
    broken("missing profile", study(runtime="ours.yaml"), "runtime: ", "ours.yaml: no such file"),
    BrokenStudy(
        id="a runtime's file that is no profile",
        text=study(runtime="./ours.yaml"),
        words=("study.yaml", "runtime: ", "ours.yaml: sources", "is required and missing"),
        files={"ours.yaml": "rule_set: megatron\n"},
    ),
    broken(
        "unknown runtime",
        study(runtime="megatron"),
        "runtime = 'megatron'",
        "is no runtime profile",
        "did you mean 'megatron-core'?",
    ),
    broken(
        "no possible tp", study(space="{tp: [3]}"), "space.tp = [3]", "the cluster's 8 devices", "valid: 1, 2, 4, 8"
    ),
    broken("no possible mbs", study(space="{mbs: [5, 7]}"), "space.mbs = [5, 7]", "global batch of 16", "valid: 1, 2,"),
    broken("no possible ep", study(space="{ep: [2]}"), "space.ep = [2]", "must be 1 without experts", "valid: 1"),
    broken("unknown rule set", study(space="{rules: flex}"), "space.rules = 'flex'", "'flexparallel'?"),
    broken("unknown rule", study(space="{without: [head]}"), "space.without = 'head'", "did you mean 'heads'?"),
    broken("the rule that none can do without", study(space="{without: [devices]}"), "'devices'", "switched off"),
    broken("unknown recompute", study(space="{recompute: [some]}"), "space.recompute.0 = 'some'", "'selective' or"),
    broken(
        "unknown module",
        study(job=GOOD["job"][:-1] + ", recompute_modules: [core_atn]}"),
        "job.recompute_modules = 'core_atn'",
        "did you mean 'core_attn'?",
    ),
    broken("negative shard", study(job=GOOD["job"][:-1] + ", dp_shard: -1}"), "job.dp_shard = -1", "greater than or"),
    broken(
        "experts' degree that the runtime lacks",
        study(runtime="nanotron", job=GOOD["job"][:-1] + ", expert_tp: 1}"),
        "job.expert_tp = 1",
        "is not offered by the runtime nanotron",
    ),
    broken("unknown precision", study(job=GOOD["job"][:-1] + ", precision: int4}"), "job.precision = 'int4'", "'bf16'"),
    broken(
        "precision that the device lacks",
        study(cluster="{name: dgx-a100}", job=GOOD["job"][:-1] + ", precision: fp8}"),
        "job.precision = 'fp8'",
        "no known peak on A100-SXM-80",
        "use one of: bf16",
    ),
    broken("unknown optimizer", study(job=GOOD["job"][:-1] + ", optimizer: adan}"), "optimizer = 'adan'", "'adam'"),
    broken("unknown backend", study(trial="{backend: slurm}"), "trial.backend = 'slurm'", "replay, simulated"),
    broken("unknown fidelity", study(trial="{backend: simulated, fidelity: exact}"), "trial.fidelity = 'exact'"),
    broken(
        "recompute of the current configuration",
        study(current="{tp: 8, recompute: half}"),
        "current.recompute = 'half'",
        "must be none, selective or full",
    ),
    broken(
        "a trace that is not there",
        study(cluster="{name: dgx-h100, trace: net.csv}"),
        "cluster.trace: ",
        "net.csv: no such file",
    ),
    broken(
        "a trace of another cluster",
        study(cluster="{name: dgx-h100, trace: net.csv}"),
        "cluster.trace: ",
        "net.csv:2: link = 'h1': is no host of the cluster",
        "valid: h0",
        **{"net.csv": "time_s,link,share\n60,h1,lost\n"},
    ),
    # out of range
    broken("no hosts", study(cluster="{name: dgx-h100, hosts: 0}"), "cluster.hosts = 0", "greater than or equal to 1"),
    broken("negative hosts", study(cluster="{name: dgx-h100, hosts: -1}"), "cluster.hosts = -1", "must be greater"),
    broken("too many hosts", study(cluster="{name: dgx-h100, hosts: 999999}"), "cluster.hosts", "7999992 devices"),
    broken(
        "more devices than a host has",
        study(cluster="{name: dgx-h100, devices_per_host: 9}"),
        "cluster.devices_per_host = 9",
        "a dgx-h100 host has 8 devices",
    ),
    broken(
        "negative sequence",
        study(job="{sequence_length: -4096, global_batch_size: 16}"),
        "job.sequence_length = -4096",
        "must be greater",
    ),
    broken(
        "no batch at all",
        study(job="{sequence_length: 4096, global_batch_size: 0}"),
        "job.global_batch_size = 0",
        "must be greater",
    ),
    broken("headroom above 1", study(space="{memory_headroom: 1.5}"), "space.memory_headroom = 1.5", "less than 1"),
    broken("tolerance 1", study(search="{tolerance: 1}"), "search.tolerance = 1", "less than 1"),
    broken("confidence 0", study(search="{confidence: 0}"), "search.confidence = 0", "greater than 0"),
    broken("confidence nan", study(search="{confidence: .nan}"), "search.confidence = nan", "must be"),
    broken("one draw", study(search="{draws: 1}"), "search.draws = 1", "greater than or equal to 10"),
    broken("no trials", study(search="{max_trials: 0}"), "search.max_trials = 0", "greater than or equal to 1"),
    broken("negative seed", study(search="{seed: -1}"), "search.seed = -1", "greater than or equal to 0"),
    broken(
        "no device-hours", study(search="{budget_device_hours: 0}"), "search.budget_device_hours = 0", "greater than 0"
    ),
    broken("no seconds", study(search="{max_seconds: 0}"), "search.max_seconds = 0", "greater than 0"),
    broken(
        "torch backend with another framework's rules",
        study(trial="{backend: torch}"),
        "runtime = 'megatron-core'",
        "runtime: torch-reference",
    ),
    broken(
        "torch backend with more steps at least than at most",
        study(runtime="torch-reference", trial="{backend: torch, min_steps: 30}"),
        "trial.max_steps = 20",
        "at least min_steps, which is 30",
    ),
    broken(
        "virtual clock of a GPU",
        study(runtime="torch-reference", trial="{backend: torch, clock: virtual}"),
        "trial.clock = 'virtual'",
        "clock: wall",
    ),
    broken(
        "model that the torch backend cannot train",
        study(model="deepseek-v3", runtime="torch-reference", trial="{backend: torch}"),
        "deepseek-v3",
        "latent attention",
    ),
    broken(
        "precision that the torch backend cannot train in",
        study(
            runtime="torch-reference",
            job="{sequence_length: 4096, global_batch_size: 16, precision: fp8}",
            trial="{backend: torch}",
        ),
        "job.precision = 'fp8'",
        "valid: fp32, bf16",
    ),
    broken(
        "unknown clock",
        study(runtime="torch-reference", trial="{backend: torch, clock: sundial}"),
        "trial.clock = 'sundial'",
    ),
    broken("noise", study(trial="{backend: simulated, noise: -1}"), "trial.noise = -1", "greater than or equal to 0"),
    # proxies
    broken("proxies without hosts", proxies("{layers: 4}"), "trial.proxy.hosts", "is required and missing"),
    broken("unknown key of proxies", proxies("{hosts: 1, devices: 8}"), "trial.proxy.devices = 8", "unknown key"),
    broken("number for proxies", proxies("2"), "trial.proxy = 2", "must be a mapping"),
    broken("proxies on no host", proxies("{hosts: 0}"), "trial.proxy.hosts = 0", "greater than or equal to 1"),
    broken(
        "proxies on all hosts",
        proxies("{hosts: 4}"),
        "trial.proxy.hosts = 4",
        "must be fewer than the 4 hosts of the cluster",
        "at most 3",
    ),
    broken(
        "proxies of one host",
        study(trial="{backend: simulated, proxy: {hosts: 1}}"),
        "trial.proxy.hosts = 1",
        "must be fewer than the 1 hosts of the cluster",
        "leave proxy out",
    ),
    broken(
        "proxies of unlike hosts",
        proxies("{hosts: 1}", cluster="{groups: [{name: dgx-h100}, {name: dgx-a100}]}"),
        "trial.proxy",
        "needs equal hosts",
    ),
    broken(
        "proxies with more layers",
        proxies("{hosts: 1, layers: 33}"),
        "trial.proxy.layers = 33",
        "must be from 1 to the 32 layers of the model",
    ),
    replayed(
        "proxies of a replay",
        rows({}),
        "trial.proxy",
        "cannot be run by the backend replay",
        "leave proxy out",
        trial="{backend: replay, measured: [rows.csv], proxy: {hosts: 1}}",
    ),
    broken("word for layers", proxies("{hosts: 1, layers: few}"), "trial.proxy.layers = 'few'", "auto"),
    broken("no layers", proxies("{hosts: 1, layers: 0}"), "trial.proxy.layers = 0", "auto or a whole number"),
    broken(
        "more trials at full size than trials",
        proxies("{hosts: 1, full_trials: 5}", search="{max_trials: 5}"),
        "trial.proxy.full_trials = 5",
        "must be fewer than search.max_trials, which is 5",
        "at most 4",
    ),
    broken("empty tp", study(space="{tp: []}"), "space.tp = []", "at least one value, each once"),
    broken("repeated tp", study(space="{tp: [1, 2, 2]}"), "space.tp = [1, 2, 2]", "at least one value, each once"),
    broken("tp 0", study(space="{tp: [0, 1]}"), "space.tp.0 = 0", "greater than or equal to 1"),
    broken("ZeRO stage 4", study(space="{zero_stage: [4]}"), "space.zero_stage.0 = 4", "less than or equal to 3"),
    broken(
        "ZeRO stage that the runtime lacks",
        study(space="{zero_stage: [1, 3]}"),
        "space.zero_stage = 3",
        "is not offered by the runtime megatron-core",
        "valid: 0, 1",
    ),
    broken(
        "recompute that the runtime lacks",
        study(runtime="nanotron", job=GOOD["job"][:-1] + ", recompute: selective}"),
        "job.recompute = 'selective'",
        "is not offered by the runtime nanotron",
        "valid: none, full",
    ),
    broken("slash in the name", study(name="a/b"), "name = 'a/b'", "letters, digits, dots, dashes and underscores"),
    broken("storage", study(storage="meshtune.db"), "storage = 'meshtune.db'", "not a database URL", "sqlite:///"),
    # history
    broken("history that is no list", study(history="a.csv"), "history = 'a.csv'", "must be a list"),
    broken("number in the history", study(history="[3]"), "history.0 = 3", "must be text"),
    broken("history of unknown form", study(history="[old.db]"), "history.0 = 'old.db'", "neither a database URL nor"),
    broken("history elsewhere", study(history="['s3://a/b.csv']"), "history.0 = 's3://a/b.csv'", "not a database URL"),
    broken(
        "missing database", study(history="['sqlite:///no.db']"), "history.0 = 'sqlite:///no.db'", "no such database"
    ),
    broken("database in memory", study(history="['sqlite://']"), "history.0 = 'sqlite://'", "no such database"),
    broken("missing past", study(history="[runs.csv]"), "history.0", "runs.csv", "no such file"),
    BrokenStudy(
        id="doubled history",
        text=study(history="[runs.csv, runs.csv]"),
        words=("study.yaml", "history.1 = 'runs.csv'", "named twice"),
        files={"runs.csv": rows({})},
    ),
    # the current configuration
    broken(
        "current on other devices",
        study(current="{tp: 8, dp: 8}"),
        "current = 'pp=1,tp=8,dp=8,cp=1,up=1,vpp=1,ep=1,mbs=1'",
        "must be the 8 devices",
    ),
    broken(
        "current mbs 0", study(current="{tp: 8, mbs: 0}"), "current.mbs = 0", "must be a whole number of at least 1"
    ),
    broken("current batch", study(current="{tp: 8, mbs: 3}"), "current", "mbs=3", "dp*mbs must divide", "16 sequences"),
    broken("current ep of a dense model", study(current="{dp: 8, ep: 2}"), "current", "ep=2", "ep must divide"),
    broken(
        "current ep that does not divide",
        study(model="mixtral-8x7b", current="{tp: 2, dp: 4, ep: 8}"),
        "current",
        "ep=8",
        "must divide tp*dp*cp*up",
    ),
    broken(
        "current pp above the layers", study(cluster="{name: l20, hosts: 8}", current="{pp: 64}"), "pp=64", "layers"
    ),
    broken(
        "current with another ZeRO stage",
        study(current="{tp: 8, zero_stage: 0}"),
        "current.zero_stage = 0",
        "the study fixes zero_stage to 1",
        "space.zero_stage",
    ),
    # models from files
    BrokenStudy(
        id="missing model file",
        text=study(model="lama.json"),
        words=("lama.json", "no such file", "did you mean 'llama.json'?"),
        files={"llama.json": CONFIG_JSON},
    ),
    BrokenStudy(
        id="config.json without a size",
        text=study(model="llama.json"),
        words=("llama.json", "num_hidden_layers", "is required and missing"),
        files={"llama.json": CONFIG_JSON.replace('"num_hidden_layers": 32, ', "")},
    ),
    BrokenStudy(
        id="unknown model type",
        text=study(model="llama.json"),
        words=("llama.json", "model_type = 'lama'", "unknown model type", "did you mean 'llama'?"),
        files={"llama.json": CONFIG_JSON.replace('"llama"', '"lama"')},
    ),
    BrokenStudy(
        id="config.json cut off",
        text=study(model="llama.json"),
        words=("llama.json", "line 1", "is not valid JSON"),
        files={"llama.json": CONFIG_JSON[:-1]},
    ),
    BrokenStudy(
        id="model file with a size too few",
        text=study(model="tiny.yaml"),
        words=("tiny.yaml", "is required and missing"),
        files={"tiny.yaml": "source: made up\nnum_layers: 2\n"},
    ),
    BrokenStudy(
        id="missing cluster file", text=study(cluster="{file: cluster.yaml}"), words=("cluster.yaml", "no such file")
    ),
    # measured rows
    BrokenStudy(id="missing CSV", text=study(REPLAY), words=("rows.csv", "no such file")),
    replayed(
        "missing column",
        rows({}, columns=tuple(column for column in COLUMNS if column != "gbs")),
        "rows.csv:1",
        "gbs",
        "is a missing column",
    ),
    replayed("text in a number", rows({"tp": "eight"}), "rows.csv:2", "tp = 'eight'", "must be a number"),
    replayed("ragged row", rows({}) + "a,b\n", "rows.csv:3", "has 2 cells where the header has"),
    replayed("no rows", rows(), "rows.csv", "holds no measured run"),
    replayed(
        "where names no column",
        rows({}),
        "where.batch",
        "is no column of the file",
        trial="{backend: replay, measured: [rows.csv], where: {batch: 16}}",
    ),
    replayed(
        "where matches nothing",
        rows({}, {"gbs": 32, "mbs": 2}),
        "where.gbs = 64",
        "matches no row",
        "16, 32",
        trial="{backend: replay, measured: [rows.csv], where: {gbs: 64}}",
    ),
    replayed("where leaves two jobs", rows({}, {"gbs": 32}), "trial.where", "2 values of `gbs`", "16, 32"),
    replayed(
        "no complete configuration", rows({"tp": ""}, {"dp": 3}), "where", "none of which has a complete and consistent"
    ),
    replayed("no step time", rows({"step_seconds": "", "mfu": 0.4}), "where", "rows without a step time"),
    replayed(
        "replay with a model",
        rows({}),
        "study.yaml",
        "model = 'llama3-8b'",
        "takes its model and job from the measured rows",
        "leave model out",
        model="llama3-8b",
    ),
    replayed("replay with a job", rows({}), "study.yaml", "job", "leave job out", job=GOOD["job"]),
    replayed(
        "cluster contradicts the rows",
        rows({}),
        "study.yaml",
        "cluster = {'name': 'dgx-h100', 'hosts': 2}",
        "ran on 8 devices, and the cluster has 16",
        cluster="{name: dgx-h100, hosts: 2}",
    ),
    replayed(
        "value of where",
        rows({}),
        "trial.where.gbs = [16]",
        trial="{backend: replay, measured: [rows.csv], where: {gbs: [16]}}",
    ),
    replayed("no files", rows({}), "trial.measured = []", "at least 1", trial="{backend: replay, measured: []}"),
]
