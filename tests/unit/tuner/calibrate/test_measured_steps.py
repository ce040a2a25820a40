import json
from dataclasses import replace

import pytest

from costmodels.calibration.measured_runs import COLUMNS
from costmodels.calibration.profile_file import peak_errors_of, profile_text
from costmodels.job.runtime import CONSTANTS, catalog_path, find_runtime, read_profile, runtime_names
from docs.site.json_keys import JSON_KEYS
from hardware.io.config_file import parse_yaml
from tests.support.settings.synthetic_runs import varied_runs
from tests.support.studies.broken_studies import rows, study
from tuner.calibrate.measured_steps import calibrate_file
from tuner.study_file.config import load_study

LAYOUTS = ((8, 1, 1), (8, 1, 2), (4, 2, 1), (4, 2, 2), (2, 4, 1))
RUNS = tuple(
    {"tp": tp, "dp": dp, "mbs": mbs, "step_seconds": 1.5 - 0.1 * position}
    for position, (tp, dp, mbs) in enumerate(LAYOUTS)
)


@pytest.fixture
def measured(tmp_path):
    """A CSV file of five timed runs."""
    path = tmp_path / "runs.csv"
    path.write_text(rows(*RUNS), encoding="utf-8")
    return path


def test_a_fit_is_one_json_object_and_a_profile(calibrate, measured, tmp_path):
    """The JSON tells the constants and what was left out; the profile holds them; progress goes to stderr."""
    tagged = tmp_path / "more.csv"
    tagged.write_text(rows(*({**run, "model": "tagged", "notes": "SUSPECT"} for run in RUNS[:2])), encoding="utf-8")
    status, out, err = calibrate("--measured", measured, tagged, "--out", tmp_path / "ours.yaml", "--json")

    told = json.loads(out)
    assert status == 0, err
    assert told.keys() == JSON_KEYS["calibrate"]["with `--measured`"].keys()
    assert (told["runtime"], told["runs"], told["sources"]) == ("megatron-core", 5, ["made up"])
    assert told["skipped"] == {"runs tagged OUTLIER, LOW-MFU, SUSPECT": 2}
    assert told["constants"].keys() == CONSTANTS.keys()
    assert told["device_speed"].keys() == {"H100-SXM-80"}
    assert err.startswith("fitting megatron-core to 5 runs\n")
    profile = read_profile(tmp_path / "ours.yaml")
    for name, fitted in told["constants"].items():
        assert fitted.keys() == {"value", "log_error", "determined", "at_bound"}
        assert getattr(profile, name) == pytest.approx(fitted["value"], rel=1e-3)


def test_a_fit_in_words(calibrate, measured, tmp_path):
    """A profile is not overwritten by accident; with `--force` the table names every constant, a sentence what the runs
    do not determine, and `runtime:` of a study takes the profile's path and predicts with its constants.
    """
    out = tmp_path / "ours.yaml"
    out.write_text("precious\n", encoding="utf-8")
    (tmp_path / "study.yaml").write_text(study(runtime="./ours.yaml"), encoding="utf-8")
    refused = calibrate("--measured", measured, "--out", out)
    assert refused[:2] == (2, "")
    assert "exists; --force replaces it" in refused[2]
    assert out.read_text(encoding="utf-8") == "precious\n"

    status, told, err = calibrate("--measured", measured, "--out", out, "--force")
    runtime = load_study(tmp_path / "study.yaml").problem.setting.runtime

    assert status == 0, err
    assert told.startswith("Fitted megatron-core to 5 runs of made up.\n")
    assert all(name in told for name in CONSTANTS)
    assert "The runs do not determine " in told
    assert err.endswith("ours.yaml\n")
    assert runtime.name == "ours"
    assert runtime.rule_set == find_runtime("megatron-core").rule_set
    assert runtime.matmul_efficiency != find_runtime("megatron-core").matmul_efficiency


def test_runs_of_several_runtimes_need_a_choice(calibrate, tmp_path):
    """Files with several runtimes are refused with their counts; `--runtime` takes the runs of one."""
    path = tmp_path / "runs.csv"
    path.write_text(rows(*RUNS, *({**run, "notes": "nanotron"} for run in RUNS[:3])), encoding="utf-8")
    status, _, err = calibrate("--measured", path, "--out", tmp_path / "ours.yaml")

    assert status == 2
    assert "several runtimes: megatron-core (5 runs), nanotron (3 runs); choose one with --runtime" in err
    assert not (tmp_path / "ours.yaml").exists()


def test_known_sources_of_another_runtime_are_left_out(tmp_path):
    """With `--runtime`, runs of unknown sources are taken to be of it, those that the table knows better are not."""
    path = tmp_path / "runs.csv"
    path.write_text(rows(*RUNS, *({**run, "source": "vtrain"} for run in RUNS[:2])), encoding="utf-8")
    done = calibrate_file(
        [path], tmp_path / "ours.yaml", runtime="nanotron", overwrite=False, on_progress=lambda _line: None
    )

    assert (done.runtime, done.fit.num_runs) == ("nanotron", 5)
    assert done.skipped == {"runs of another runtime": 2}


def test_a_row_that_states_its_runtime_is_of_no_other(tmp_path):
    """With `--runtime`, rows of an unknown source that state another runtime are left out."""
    path = tmp_path / "runs.csv"
    stating = ({**run, "runtime": "torchtitan"} for run in RUNS[:2])
    path.write_text(rows(*RUNS, *stating, columns=(*COLUMNS, "runtime")), encoding="utf-8")
    done = calibrate_file(
        [path], tmp_path / "ours.yaml", runtime="nanotron", overwrite=False, on_progress=lambda _line: None
    )

    assert (done.runtime, done.fit.num_runs) == ("nanotron", 5)
    assert done.skipped == {"runs of another runtime": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--measured", "no.csv", "--out", "x.yaml"), "no.csv: no such file"),
        (("--measured", "bad.csv", "--out", "x.yaml"), "is a missing column"),
        (("--measured", "few.csv", "--out", "x.yaml"), "at least 3 timed runs"),
        (("--measured", "few.csv", "--out", "x.txt"), "must end in .yaml"),
        (("--measured", "few.csv", "--out", "no/x.yaml"), "a directory that does not exist"),
        (("--measured", "few.csv", "--out", "x.yaml", "--runtime", "megatrn"), "did you mean 'megatron-core'?"),
        (("--out", "x.yaml"), "--measured"),
        (("--measured", "few.csv"), "--out"),
    ],
)
def test_mistakes_are_one_message(calibrate, tmp_path, monkeypatch, arguments, words):
    """What cannot work ends with status 2, one line that says why, and no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tmp_path / "few.csv").write_text(rows(*RUNS[:2]), encoding="utf-8")
    status, out, err = calibrate(*arguments)

    assert (status, out) == (2, "")
    assert words in err
    assert err.splitlines()[-1].startswith("meshtune: ")
    assert "Traceback" not in err
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("name", runtime_names())
def test_every_shipped_profile_can_be_written_again(name, tmp_path):
    """A written profile differs from the one that its fit began with in what was fitted, and in nothing else."""
    from costmodels.calibration.fitting import Calibration, FittedConstant

    base = find_runtime(name)
    fit = Calibration(
        profile=base,
        constants={
            constant: FittedConstant(
                value=getattr(base, constant),
                log_error=dict(base.log_errors)[constant],
                is_determined=True,
                at_bound=False,
            )
            for constant in CONSTANTS
        },
        device_speed={},
        num_runs=3,
        sources=("made up: a, b",),
        median_ape=0.1,
        step_error=base.step_error,
        skipped={},
    )
    text = profile_text(catalog_path(name), fit, None, is_own=False)
    path = tmp_path / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")

    written = read_profile(path)
    rounded = {constant: pytest.approx(getattr(base, constant), rel=1e-3) for constant in CONSTANTS}
    assert {constant: getattr(written, constant) for constant in CONSTANTS} == rounded
    same = {constant: getattr(base, constant) for constant in CONSTANTS}
    assert replace(written, **same, log_errors=(), device_speed=(), residuals=()) == replace(
        base, log_errors=(), device_speed=(), residuals=()
    )
    assert parse_yaml(text)["sources"] == parse_yaml(catalog_path(name).read_text(encoding="utf-8"))["sources"]
    assert parse_yaml(text)["fitted_on"] == "3 runs of made up: a, b"


def test_the_spread_of_peaks():
    """Peaks 10% above the prediction give a memory error of 10%; without enough peaks there is none."""
    from costmodels.calibration.fidelity import predict, settings_of

    base = find_runtime("megatron-core")
    kept, settings, _ = settings_of(varied_runs(), {}, base.name)
    peaks = predict(kept, settings).peak_memory_bytes
    runs = [replace(run, peak_memory_bytes=int(1.1 * peak)) for run, peak in zip(kept, peaks, strict=True)]

    assert peak_errors_of(runs, base).spread == pytest.approx(0.0953, rel=1e-3)
    assert peak_errors_of(runs[:5], base) is None
