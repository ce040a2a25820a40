"""The commands `learn` and `share`: from logs to a profile that a study names, and to rows that name nobody."""

import csv
import json
import re
import sys
from dataclasses import replace

import pytest

from costmodels.calibration.measured_runs import COLUMNS, read_measured
from costmodels.calibration.sources import setting_of
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime, read_profile
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from docs.site.json_keys import JSON_KEYS
from tests.support.studies.broken_studies import rows, study
from tests.support.studies.training_logs import TORCHTITAN_H200, dense_log
from trials.backend import Observation, Status
from tuner.cli.main import main
from tuner.learn.learning import gather
from tuner.learn.rows import ROW_COLUMNS
from tuner.storage.history import keep_run, make_tables
from tuner.storage.opening import open_store
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 1, 4), (2, 2, 1), (1, 2, 2))
EFFICIENCY = 0.85
"""Share of the catalog's efficiency of matrix products that the made-up cluster reaches."""


@pytest.fixture
def meshtune(capsys, monkeypatch, tmp_path):
    """Runs a command of Meshtune's in an empty folder; its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


def true_step_s(tmp_path, text):
    """The step time of a log's run on a cluster whose matrix products are slower than the catalog's."""
    file = tmp_path / "dry.log"
    file.write_text(text, encoding="utf-8")
    (row,) = gather([file], Added(cluster="H100"), source="dry", models="m").rows
    (tmp_path / "dry.csv").write_text(
        ",".join(ROW_COLUMNS) + "\n" + ",".join(row.cells[name] for name in ROW_COLUMNS) + "\n", encoding="utf-8"
    )
    (run,) = read_measured(["dry.csv"], {}, tmp_path)
    setting = setting_of(run, {}).setting
    slow = replace(setting.runtime, matmul_efficiency=EFFICIENCY * setting.runtime.matmul_efficiency)
    setting, grid = replace(setting, runtime=slow), ConfigGrid.from_configs([run.config])
    return float(estimate_step(setting, grid, memory=estimate_memory(setting, grid)).step_time_s[0])


@pytest.fixture
def sweeps(tmp_path):
    """Two folders of six logs, of two models on one cluster, which is slower than the catalog's."""
    for name, hidden in (("large", 6144), ("small", 4096)):
        (tmp_path / name).mkdir()
        for number, layout in enumerate(LAYOUTS):
            seconds = true_step_s(tmp_path, dense_log(hidden, *layout, 100.0))
            text = dense_log(hidden, *layout, seconds, first_loss=10 + number / 100)
            (tmp_path / name / f"run-{number}.log").write_text(text, encoding="utf-8")
    return tmp_path


def test_logs_become_a_profile_that_predicts_ones_cluster(meshtune, sweeps):
    """Sweeps are predicted better by a fit to another one, and a study predicts with the profile by its path."""
    status, out, err = meshtune("learn", "large", "small", "--cluster", "H100", "--json")
    told = json.loads(out)

    assert status == 0, err
    assert told.keys() == JSON_KEYS["learn"][""].keys()
    assert (told["rows"], len(told["added"]), told["refused"], told["runtime"]) == (12, 12, [], "megatron-core")
    assert [(one["name"], one["runs"]) for one in told["held_out"]["parts"]] == [("large", 6), ("small", 6)]
    # the smaller model waits for the host, which is the catalog's, and its error was small before
    large, small = told["held_out"]["parts"]
    assert large["after"] < 0.9 * large["before"]
    assert large["ratio_before"] < large["ratio_after"] < 1
    assert small["after"] < 0.1
    assert told["held_out"]["after"] < 0.9 * told["held_out"]["before"]
    shipped, fitted = find_runtime("megatron-core"), read_profile(sweeps / "my-profile.yaml")
    assert fitted.matmul_efficiency * dict(fitted.device_speed)["H100-SXM-80"] < (
        0.95 * shipped.matmul_efficiency * shipped.speed_of("H100-SXM-80")
    )
    assert fitted.step_error == pytest.approx(told["fit"]["held_out_error"], rel=1e-3)
    (sweeps / "study.yaml").write_text(study(runtime="./my-profile.yaml"), encoding="utf-8")
    assert load_study(sweeps / "study.yaml").problem.setting.runtime.matmul_efficiency == fitted.matmul_efficiency


def test_a_pool_grows_with_each_call(meshtune, sweeps):
    """A second call adds what is new, says in words what changed, and replaces the profile."""
    meshtune("learn", "large", "--cluster", "H100")
    (sweeps / "large" / "run-9.log").write_text(dense_log(6144, 8, 1, 1, 9.0), encoding="utf-8")
    status, out, err = meshtune("learn", "large", "small", "--cluster", "H100")

    assert status == 0, err
    assert out.startswith("my-runs.csv: 13 runs, 7 of them new, 6 known already.\n")
    assert re.search(r"small +6 +[\d.]+% +[\d.]+% +0\.\d\d -> ", out)
    assert "a study names it by `runtime: ./my-profile.yaml`" in out


def test_one_run_is_kept_and_predicted(meshtune, tmp_path):
    """A single log grows the pool and tells the error of its prediction; there is nothing to fit yet."""
    (tmp_path / "train.log").write_text(TORCHTITAN_H200, encoding="utf-8")
    status, out, err = meshtune("learn", "train.log")

    assert status == 0, err
    assert "No profile was written: a fit needs 3 timed runs of torchtitan, and the pool has 1." in out
    assert re.search(r"H200-SXM, 8, bf16, 8192, 8 +1 +[\d.]+% +too few others", out)
    assert "print_config: is off" in err
    assert not (tmp_path / "my-profile.yaml").exists()


def test_a_fit_that_does_not_help_is_not_written(meshtune, tmp_path):
    """Two sources that contradict each other teach nothing of each other, unless `--force` asks for the profile."""
    for name, share in (("slow", 2.0), ("fast", 0.5)):
        (tmp_path / name).mkdir()
        for number, layout in enumerate(LAYOUTS[:4]):
            seconds = share * true_step_s(tmp_path, dense_log(4096, *layout, 100.0))
            (tmp_path / name / f"{number}.log").write_text(dense_log(4096, *layout, seconds), encoding="utf-8")
    status, out, _ = meshtune("learn", "slow", "fast", "--cluster", "H100")

    assert status == 0
    assert "No profile was written: it predicts sources left out no better than the catalog's megatron-core" in out
    assert not (tmp_path / "my-profile.yaml").exists()
    assert meshtune("learn", "slow", "--cluster", "H100", "--force")[0] == 0
    assert (tmp_path / "my-profile.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no.log",), "no.log: no such file or folder"),
        (("empty.log",), "nothing was learned: no file gives a row\n  empty.log: is empty"),
        (("train.log", "--pool", "runs.txt"), "must end in .csv"),
        (("train.log", "--out", "profile.txt"), "must end in .yaml"),
        (("train.log", "--runtime", "megatrn"), "did you mean 'megatron-core'?"),
        (("train.log", "--source", "vtrain"), "is the name of a published source"),
        (("train.log", "--out", "other.yaml"), "exists and is no runtime profile"),
        (("other.yaml",), "nothing was learned"),
        (("train.log", "--cluster", "H1000"), "--cluster = 'H1000': is no cluster and no device of the catalog"),
    ],
)
def test_mistakes_end_with_status_2(meshtune, tmp_path, arguments, words):
    """One message says what is wrong, and neither a pool nor a profile is written."""
    (tmp_path / "train.log").write_text(TORCHTITAN_H200, encoding="utf-8")
    (tmp_path / "empty.log").write_text("", encoding="utf-8")
    (tmp_path / "other.yaml").write_text("precious: true\n", encoding="utf-8")
    status, out, err = meshtune("learn", *arguments)

    assert (status, out) == (2, "")
    assert words in err
    assert not [*tmp_path.glob("my-*")]
    assert (tmp_path / "other.yaml").read_text(encoding="utf-8") == "precious: true\n"


def test_what_no_log_is_called_like_is_left_alone(meshtune, tmp_path):
    """In a folder, files of other kinds are counted and not read; a job's numbered output is a log."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "job.o1234").write_text(TORCHTITAN_H200, encoding="utf-8")
    (tmp_path / "runs" / "weights.bin").write_text(TORCHTITAN_H200, encoding="utf-8")
    told = json.loads(meshtune("learn", "runs", "--json")[1])

    assert (told["rows"], told["left_out"]) == (1, {"files called *.bin in a folder": 1})
    assert told["added"][0]["source"] == "runs"


SECRETS = ("jane", "falcon", "10.0.0.7", "/lustre", "secret")
"""Words that name a person, a project, a host or a path in the rows below."""


def test_shared_rows_name_nobody(meshtune, tmp_path):
    """Sources, paths, models and remarks are gone; sizes, degrees, facts, times and memory are what they were."""
    told = {
        "source": "jane-falcon",
        "model": "falcon-secret-7b",
        "source_url_or_repo_path": "/lustre/jane/10.0.0.7.log",
    }
    told |= {"notes": "secret run of jane; swiglu; untied; OUTLIER", "step_seconds": 1.5, "runtime": "megatron-core"}
    told |= {"facts": "overlaps_gradients=false", "peak_mem_gib": 30, "peak_mem_counts": "reserved"}
    lines = ({**told, "tp": 8, "dp": 1}, {**told, "tp": 4, "dp": 2, "step_seconds": 1.25, "source": "jane-other"})
    columns = tuple(dict.fromkeys((*COLUMNS, *told)))
    (tmp_path / "mine.csv").write_text(rows(*lines, columns=columns), encoding="utf-8")
    status, out, err = meshtune("share", "mine.csv", "--json")
    answer, text = json.loads(out), (tmp_path / "shared-runs.csv").read_text(encoding="utf-8")
    first, second = csv.DictReader(text.splitlines())

    assert status == 0, err
    assert answer.keys() == JSON_KEYS["share"][""].keys()
    assert not [word for word in SECRETS if word in text.lower()]
    assert (first["source"], second["source"], first["source_url_or_repo_path"]) == ("anonymous-1", "anonymous-2", "")
    assert (first["tp"], first["step_seconds"], second["step_seconds"]) == ("8", "1.5", "1.25")
    assert (first["facts"], first["peak_mem_gib"], first["peak_mem_counts"]) == (
        "overlaps_gradients=false",
        "30",
        "reserved",
    )
    assert "OUTLIER" in first["notes"]
    assert set(answer["left_out"]) == {"source", "source_url_or_repo_path", "model", "notes"}
    before = read_measured(["mine.csv"], {}, tmp_path)
    after = read_measured(["shared-runs.csv"], {}, tmp_path)
    assert [run.config for run in after] == [run.config for run in before]
    assert [setting_of(run, {}).setting.job.model_flops_per_step for run in after] == [
        setting_of(run, {}).setting.job.model_flops_per_step for run in before
    ]


@pytest.mark.usefixtures("sweeps")
def test_shared_rows_teach_others(meshtune):
    """What one user shares, another's pool takes, once."""
    meshtune("learn", "small", "--cluster", "H100")
    status, out, err = meshtune("share", "my-runs.csv")
    assert status == 0, err
    assert out == "wrote shared-runs.csv: 6 runs. Look it over before you give it away.\n"
    assert "  not copied: notes (free text" in err
    status, _, err = meshtune("calibrate", "--measured", "shared-runs.csv", "--out", "theirs.yaml")
    assert status == 0, err
    assert meshtune("share", "my-runs.csv")[0] == 2  # the file exists


def test_rows_that_cannot_be_shared_are_counted(meshtune, tmp_path):
    """A device outside the catalog might name a machine, so its row is left out, and the reason is told."""
    (tmp_path / "mine.csv").write_text(
        rows({"step_seconds": 1.5}, {"step_seconds": 1.5, "device": "janes-card"}), encoding="utf-8"
    )
    status, out, _ = meshtune("share", "mine.csv", "--json")

    assert (status, json.loads(out)["rows"]) == (0, 1)
    assert json.loads(out)["skipped"] == {"rows whose device is not a known device": 1}


def test_measured_trials_of_a_study_are_rows(meshtune, tmp_path):
    """Those that ended well or lacked memory; crashed ones and those of a simulated world are counted."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    (tmp_path / "study.yaml").write_text(study(storage=url), encoding="utf-8")
    request = load_study(tmp_path / "study.yaml")
    store = open_store(StorageAddress.parse(url))
    make_tables(store)
    ended = (
        Observation(status=Status.OK, step_times_s=(1.4, 1.5, 1.6), peak_memory_bytes=30 * 2**30),
        Observation(status=Status.OUT_OF_MEMORY),
        Observation(status=Status.CRASHED),
        Observation(status=Status.OK, step_times_s=(1.0,), origin="synthetic"),
    )
    for trial, (tp, observation) in enumerate(zip((8, 1, 2, 4), ended, strict=True)):
        keep_run(
            store,
            request.name,
            trial,
            request.problem.setting,
            ParallelConfig(tp=tp, dp=8 // tp, sequence_parallel=tp > 1),
            observation,
        )
    status, out, err = meshtune("learn", "study.yaml", "--json")
    told = json.loads(out)

    assert status == 0, err
    assert [(row["tp"], row["step_seconds"], row["peak_mem_gib"]) for row in told["added"]] == [
        ("8", "1.5", "30"),
        ("1", "", ""),
    ]
    assert told["added"][1]["notes"].startswith("FAILED: out of memory")
    assert told["left_out"] == {"trials of a simulated world": 1, "trials that ended as crashed": 1}
    shared = json.loads(meshtune("share", "study.yaml", "--json")[1])
    assert (shared["rows"], str(tmp_path) in (tmp_path / "shared-runs.csv").read_text(encoding="utf-8")) == (2, False)
