from pathlib import Path

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import CASES, CONFIG_JSON, GOOD, REPLAY, BrokenStudy, rows, study
from trials.replay.backend import ReplayBackend
from trials.simulated.backend import SimulatedBackend
from tuner.study_file.config import load_study
from tuner.study_file.meaning import first_difference
from tuner.study_file.storage_address import StorageAddress

STUDIES = Path(__file__).resolve().parents[4] / "configs" / "studies"


@pytest.fixture(autouse=True)
def no_storage_variable(monkeypatch):
    """No test sees the storage of whoever runs the tests."""
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)


@pytest.fixture
def good_study(tmp_path) -> Path:
    """A study with the required keys only."""
    path = tmp_path / "study.yaml"
    path.write_text(study(), encoding="utf-8")
    return path


def write(folder: Path, text: str, name: str = "study.yaml") -> Path:
    """Writes one file, with the folders that it needs; its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# Good studies


def test_what_a_study_leaves_out_has_its_documented_default(good_study):
    """The tables in docs/study-file.md: every optional key has the default that it names."""
    config = load_study(good_study)

    assert config.name == "broken"
    assert config.file == str(good_study)
    assert config.storage == StorageAddress.of_file(good_study.parent / "meshtune.db")
    assert config.problem.setting.runtime.name == "megatron-core"
    job = config.problem.setting.job
    assert (job.precision, job.optimizer, job.recompute, job.zero_stage) == ("bf16", "adam", "none", 1)
    assert job.sequence_parallel is None
    options = config.problem.options
    assert (options.rule_set, options.without, options.allowed, options.opened) == (None, (), (), ("assignment",))
    assert options.memory_headroom == 0.08
    search = config.search
    assert (search.draws, search.confidence, search.max_trials, search.max_minutes) == (100, 0.9, 40, None)
    assert (search.parallel_trials, search.seed) == (1, 0)
    assert config.history.entries == ()
    assert config.problem.current is None
    assert config.trials.time_limit_s is None
    assert not config.problem.subject.rows
    assert isinstance(config.trials.backend, SimulatedBackend)
    assert (config.trials.backend.seed, config.trials.backend.noise, config.trials.backend.operator_error) == (
        0,
        0.02,
        0.3,
    )
    assert (
        config.trials.backend.fidelity,
        config.trials.backend.num_steps,
        config.trials.backend.seconds_per_trial,
    ) == ("step_time", 5, 0.0)
    assert (job.recompute_modules, job.expert_tp, job.dp_shard) == (("core_attn",), 0, 0)
    assert config.problem.subject.defaults == {
        "recompute": "none",
        "offload": "none",
        "zero_stage": 1,
        "sequence_parallel": True,
        "expert_tp": 0,
        "dp_shard": 0,
        "recompute_layers": 0,
        "plan": "hand",
        "assignment": "",
    }


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("*.yaml")), ids=lambda path: path.relative_to(STUDIES).as_posix())
def test_every_example_loads_and_has_candidates(path):
    """Each study in configs/studies/ works, is named after its file, and ends in the default storage."""
    # uneven work takes up to half a minute to plan, and is planned for the smallest of these elsewhere
    unlike = path.parent.name == "heterogeneous" or path.stem == "unlike-hosts"
    overrides = ["space.assignment=[]"] if unlike else []
    config = load_study(path, overrides=overrides)
    space = config.problem.space()

    assert config.name.endswith(path.stem)
    assert len(space.grid) > 10
    assert config.storage.file == path.parent / "meshtune.db"


def test_the_playbook_study_replays_the_whole_sweep():
    """All 176 measured configurations are candidates, timed and failed, told apart by their ZeRO stage too."""
    config = load_study(STUDIES / "ultrascale-llama-8b-128.yaml")

    assert isinstance(config.trials.backend, ReplayBackend)
    assert config.problem.subject.rows
    assert config.problem.setting.job.model == config.problem.subject.rows[0].model
    assert (config.problem.setting.job.sequence_length, config.problem.setting.job.global_batch_size) == (4096, 256)
    assert config.problem.options.opened == ("zero_stage",)
    space = config.problem.space()
    assert (len(space.grid), space.removed) == (176, {})


def test_a_replayed_candidate_keeps_what_its_row_ran():
    """Where rows differ in an unopened dimension beside their degrees, each candidate has its own row's value."""
    where = "trial.where={model: llama-8B, devices: 128, gbs: 256, pp: 8, mbs: 8}"
    config = load_study(
        STUDIES / "ultrascale-llama-8b-128.yaml",
        overrides=[
            where,
            "trial.measured=['" + str(STUDIES.parent / "measured" / "ultrascale-llama-8b-128.csv") + "']",
            "space={}",
        ],
    )

    grid = config.problem.space().grid

    assert set(grid.zero_stage.tolist()) == {0, 1}
    assert [config.problem.config_of(grid.values(i)) for i in range(len(grid))] == [
        grid.config(i) for i in range(len(grid))
    ]


def test_expert_takes_further_dimensions_from_the_job(tmp_path):
    """What `current:` leaves out is 1, or what the job says; an opened dimension may be named."""
    text = study(
        job="{sequence_length: 4096, global_batch_size: 16, recompute: full, sequence_parallel: false}",
        space="{zero_stage: [0, 1]}",
        current="{tp: 4, dp: 2, zero_stage: 0}",
    )

    config = load_study(write(tmp_path, text))

    assert config.problem.current == ParallelConfig(tp=4, dp=2, recompute="full", zero_stage=0, sequence_parallel=False)


def test_opened_and_tightened_dimensions(tmp_path):
    """A list under `space` holds the allowed values; one of recompute or sequence_parallel also opens the dimension."""
    text = study(space="{tp: [4, 1], recompute: [full, none], sequence_parallel: [true]}")

    options = load_study(write(tmp_path, text)).problem.options

    assert dict(options.allowed) == {"tp": (1, 4), "recompute": (0, 2), "sequence_parallel": (1,)}
    assert options.opened == ("recompute", "sequence_parallel", "assignment")


def test_free_memory_has_one_key_and_the_old_one_still_counts(tmp_path, good_study):
    """The old key holds with a note; both must agree, unless the command line says it anew."""
    old = write(tmp_path, study(space="{memory_headroom: 0.1}"), "old.yaml")
    both = write(tmp_path, study(space="{memory_headroom: 0.1}", limits="{free_memory: 0.2}"), "both.yaml")
    found = load_study(old)

    assert found.problem.options.memory_headroom == 0.1
    assert [note for note in found.notes if "limits.free_memory" in note] == list(found.notes)[-1:]
    assert load_study(good_study, overrides=["limits.free_memory=0.3"]).problem.options.memory_headroom == 0.3
    assert load_study(old, overrides=["limits.free_memory=0.3"]).problem.options.memory_headroom == 0.3
    with pytest.raises(ConfigError, match=r"space.memory_headroom = 0.1: .*limits.free_memory, which is 0.2"):
        load_study(both)


def test_degrees_of_the_experts_and_of_sharding_are_fixed_or_opened(tmp_path):
    """expert_tp and dp_shard are the job's, or a list under `space` opens them; 0 is among what they may be."""
    job = GOOD["job"][:-1] + ", expert_tp: 1, dp_shard: 2, recompute_modules: [mlp, layernorm]}"

    fixed = load_study(write(tmp_path, study(model="mixtral-8x7b", job=job)))
    opened = load_study(write(tmp_path, study(model="mixtral-8x7b", space="{expert_tp: [0, 1], dp_shard: [0, 2]}")))

    assert (fixed.problem.subject.defaults["expert_tp"], fixed.problem.subject.defaults["dp_shard"]) == (1, 2)
    assert fixed.problem.setting.job.recompute_modules == ("mlp", "layernorm")
    assert opened.problem.options.opened == ("expert_tp", "dp_shard", "assignment")
    assert dict(opened.problem.options.allowed) == {"expert_tp": (0, 1), "dp_shard": (0, 2)}


# Paths, --set, storage


def test_paths_are_relative_to_the_study(tmp_path, monkeypatch):
    """A model, a cluster and measured rows are found beside the study, wherever the command runs."""
    write(tmp_path, CONFIG_JSON, "a/models/seven.json")
    write(tmp_path, "name: dgx-a100\nhosts: 2\n", "a/clusters/two.yaml")
    write(tmp_path, rows({}), "a/rows.csv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fresh = write(tmp_path, study(model="../models/seven.json", cluster="{file: ../clusters/two.yaml}"), "a/b/s.yaml")
    replay = write(tmp_path, study(REPLAY, trial="{backend: replay, measured: [../rows.csv]}"), "a/b/r.yaml")

    config = load_study(fresh)

    assert (config.problem.setting.job.model.name, config.problem.setting.cluster.num_devices) == ("seven", 16)
    assert load_study(replay).problem.subject.rows[0].place == "rows.csv:2"


def test_a_cluster_may_change_over_time(tmp_path, good_study):
    """A cluster's trace is read with the study, and changes neither the study's cluster nor what its trials mean."""
    write(tmp_path, "time_s,link,share\n60,inter,0.5\n", "net.csv")
    plain = load_study(good_study)

    traced = load_study(write(tmp_path, study(cluster="{name: dgx-h100, trace: net.csv}")))

    assert plain.trace is None
    assert [event.time_s for event in traced.trace.events] == [60]
    assert traced.problem.setting.cluster == plain.problem.setting.cluster
    assert traced.meaning == plain.meaning
    assert plain.meaning["cluster"].keys() == {"name", "groups", "inter_group_links"}


def test_storage_precedence(good_study, monkeypatch):
    """--storage wins over MESHTUNE_STORAGE, which wins over --set and the file, which win over the default."""
    in_file = {"overrides": ["storage=sqlite:///file.db"]}

    assert load_study(good_study).storage.file == good_study.parent / "meshtune.db"
    assert load_study(good_study, **in_file).storage.url == "sqlite:///file.db"
    monkeypatch.setenv("MESHTUNE_STORAGE", "sqlite:///variable.db")
    assert load_study(good_study, **in_file).storage.url == "sqlite:///variable.db"
    assert load_study(good_study, **in_file, storage="sqlite:///option.db").storage.url == "sqlite:///option.db"
    monkeypatch.setenv("MESHTUNE_STORAGE", "")
    assert load_study(good_study, **in_file).storage.url == "sqlite:///file.db"


def test_a_broken_storage_variable_is_the_users_mistake(good_study, monkeypatch):
    """MESHTUNE_STORAGE is checked like the file's key."""
    monkeypatch.setenv("MESHTUNE_STORAGE", "nowhere")

    with pytest.raises(ConfigError, match="storage = 'nowhere': is not a database URL"):
        load_study(good_study)


def test_set_replaces_keys_of_the_file(good_study):
    """`--set a.b=value` reads the value as YAML, makes missing sections, and the last one wins."""
    config = load_study(
        good_study,
        overrides=[
            "search.seed=3",
            "search.seed=4",
            "search.confidence=1e-1",
            "space.tp=[1, 2]",
            "cluster.hosts=2",
            "model=gpt-13b",
            "trial={backend: simulated, noise: 0}",
            "current.dp=16",
        ],
    )

    assert (config.search.seed, config.search.confidence) == (4, 0.1)
    assert config.problem.options.allowed == (("tp", (1, 2)),)
    assert config.problem.setting.cluster.num_devices == 16
    assert config.problem.setting.job.model.name == "gpt-13b"
    assert config.trials.backend.noise == 0
    assert config.problem.current == ParallelConfig(dp=16)


# Broken studies


def test_the_good_studies_that_are_broken_below_do_load(tmp_path):
    """The texts that the cases change have no mistake of their own."""
    assert load_study(write(tmp_path, study(GOOD))).name == "broken"
    write(tmp_path, rows({}), "rows.csv")
    assert len(load_study(write(tmp_path, study(REPLAY))).problem.subject.rows) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_mistake_is_one_message(case: BrokenStudy, tmp_path):
    """Every broken study raises ConfigError with file, key, value and rule on one line, and nothing of our source."""
    path = case.write(tmp_path)

    with pytest.raises(ConfigError) as error:
        load_study(path)

    message = str(error.value)
    for word in case.words:
        assert word in message
    assert error.value.file is not None
    assert len(message.splitlines()) == 1
    assert len(message) < 900
    for trace in ("Traceback", "pydantic", "Keys", ".py", "Error"):
        assert trace not in message.replace("ConfigError", "")


# What gives trials their meaning


def test_a_changed_meaning_is_found_by_its_key(good_study):
    """Search options and history do not change what a trial means; job, cluster, runtime and the simulated world do."""
    meaning = load_study(good_study).meaning

    (good_study.parent / "rows.csv").write_text(rows({}), encoding="utf-8")
    same = ["search.seed=9", "search.max_trials=3", "trial={backend: simulated, seconds_per_trial: 0.0}", "name=other"]
    same.append("history=[rows.csv]")
    assert first_difference(meaning, load_study(good_study, overrides=same).meaning) is None
    for override, key in (
        ("job.global_batch_size=32", "job.global_batch_size"),
        ("trial={backend: simulated, seed: 1}", "trial.seed"),
        ("runtime=nanotron", "runtime."),
        ("cluster.hosts=2", "cluster."),
        ("model=llama-7b", "model."),
        ("space.zero_stage=[0, 1]", "space.opened"),
    ):
        difference = first_difference(meaning, load_study(good_study, overrides=[override]).meaning)
        assert difference is not None
        assert difference[0].startswith(key), override


def test_a_password_in_a_refused_storage_is_not_shown(good_study):
    """A URL of an unknown kind is refused without repeating its password."""
    with pytest.raises(ConfigError) as caught:
        load_study(good_study, storage="postgres://user:c4nary@host/name")

    assert "c4nary" not in str(caught.value)
    assert "is not a database URL" in str(caught.value)
