"""`python -m benchmarks.strangers`: what is forgotten of a publisher, what a newcomer would state, and the program."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.strangers import errors as strangers_errors
from benchmarks.strangers.__main__ import main
from benchmarks.strangers.errors import LeftOutErrors, fit_errors, write_accuracy, write_errors
from benchmarks.strangers.left_out import GUESSED_MEMORY, GUESSED_STEP, Without, has_seen, profile_without
from benchmarks.strangers.predicting import error_after_one
from benchmarks.strangers.tuning import ranges_against
from benchmarks.support.problems import strange_setting
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import CONSTANTS, find_prior, find_runtime
from costmodels.step.error_models import CATALOG_FILE, ErrorModel, ErrorModels, MemoryErrorModel, error_models
from hardware.io.config_file import read_mapping, validate_mapping
from tests.support.benchmark_runs import ROOT
from tests.support.settings.synthetic_runs import small_model, unmeasured_run
from tuner.atlas import accuracy
from tuner.atlas.accuracy import read_accuracy
from tuner.search.step_draws import StepDraws

MEASURED = ROOT / "configs" / "measured" / "ultrascale-llama-8b-128.csv"


def timed(source, step_time_s=1.0, **changes):
    """Return a run of a source on eight devices."""
    changes = {"notes": "", "device": "H100-SXM-80", **changes}
    config = changes.pop("config", ParallelConfig(dp=8, zero_stage=3))
    return unmeasured_run(small_model(2048), config, source=source, step_time_s=step_time_s, **changes)


def without(runtime, publisher, *runs, cache=None):
    """Return the profile as if the publisher had never been seen."""
    return profile_without(Without(runtime=runtime, publisher=publisher, runs=runs, cache=cache))


def constants(profile):
    """Return the values of the profile's constants."""
    return {name: getattr(profile, name) for name in CONSTANTS}


def test_a_profile_that_never_saw_the_publisher_stays_as_it_is_shipped():
    """Neither another publisher of the same runtime nor an unknown one changes a profile."""
    assert without("megatron-core", "somebody", timed("somebody")) == find_runtime("megatron-core")
    assert without("nanotron", "vtrain", timed("vtrain")) == find_runtime("nanotron")


def test_a_profile_forgets_all_that_its_only_publisher_taught():
    """Constants, device speeds, errors and the facts about memory go back to the guesses before the fit."""
    found, shipped = without("nanotron", "ultrascale-playbook", timed("ultrascale-playbook")), find_runtime("nanotron")

    assert constants(found) == constants(find_prior("nanotron")) != constants(shipped)
    assert (found.device_speed, found.residuals) == ((), ())
    assert (found.step_error, found.memory_error) == (GUESSED_STEP, GUESSED_MEMORY)
    assert (found.activation_slack, found.gathered_share) == (0.2, 0)
    assert (found.memory_overhead_bytes, found.fused_attention) == (shipped.memory_overhead_bytes, True)


def test_a_fit_sees_no_run_of_the_left_out_publisher(tmp_path):
    """The constants follow the other publishers' runs, whatever the left-out one measured; a second call reads them."""
    shapes = [ParallelConfig(dp=8, mbs=mbs, zero_stage=3) for mbs in (1, 2, 4)]
    others = [timed("nemo-automodel", 0.5 * config.mbs**0.1, config=config) for config in shapes]
    slow = without("torchtitan", "fms-fsdp", timed("fms-fsdp", 100.0), *others, cache=tmp_path)
    fast = without("torchtitan", "fms-fsdp", timed("fms-fsdp", 0.001), *others)
    again = without("torchtitan", "fms-fsdp", timed("fms-fsdp", 100.0), *others, cache=tmp_path)

    assert constants(slow) == constants(fast) != constants(find_prior("torchtitan"))
    assert slow == again
    assert len(list(tmp_path.iterdir())) == 1


def test_a_copied_profile_forgets_with_the_one_that_it_copies():
    """Profiles whose constants are megatron-deepspeed's lose what vTrain taught, and keep their own facts."""
    found, shipped = without("gpt-neox", "vtrain", timed("vtrain")), find_runtime("gpt-neox")

    assert constants(found) == constants(without("megatron-deepspeed", "vtrain", timed("vtrain")))
    assert replace(found, **constants(shipped)) == shipped
    assert without("gpt-neox", "bigscience", timed("bigscience-gpt2-v100")) == shipped


def test_a_newcomer_knows_no_conclusions_from_measurements():
    """Documented facts of a source hold under its own runtime, inferred ones do not; another profile brings its own."""
    run = timed("ultrascale-playbook", config=ParallelConfig(dp=8, zero_stage=1), notes="unfused attention")
    own = strange_setting(run, find_runtime("nanotron")).setting.runtime
    another = strange_setting(run, find_runtime("megatron-core")).setting.runtime

    assert (own.stalled_hosts, own.fused_attention) == (find_runtime("nanotron").stalled_hosts, False)
    assert another == find_runtime("megatron-core")


def left_out(log_error, effect=None, log_memory=None):
    """Return errors of step times, and of memory where it was measured."""
    log_memory = np.full(len(log_error), np.nan) if log_memory is None else log_memory
    effect = np.zeros(len(log_error)) if effect is None else effect
    return LeftOutErrors(log_error=log_error, effect=effect, log_memory=log_memory, log_unknown_memory=2 * log_memory)


def test_the_error_model_is_found_again():
    """Errors drawn from a model, of twenty publishers, are fitted by it within its own uncertainty."""
    rng, truth = np.random.default_rng(0), ErrorModel(unseen=0.1, constants=1.5, freedom=4)
    errors = {}
    for publisher in range(60):
        effect = rng.uniform(0.01, 0.3, 20)
        errors[str(publisher)] = left_out(truth.scale(effect) * rng.standard_t(truth.freedom, 20), effect)

    found = fit_errors(errors).step

    assert found.unseen == pytest.approx(truth.unseen, rel=0.15)
    assert found.constants == pytest.approx(truth.constants, rel=0.15)
    assert found.freedom in (3, 4, 6)


def test_the_error_of_memory_is_found_again():
    """Peaks whose errors have Student's t are fitted within a tenth, without a profile at twice the scale.

    Publishers without peaks change nothing.
    """
    rng = np.random.default_rng(2)
    errors = {str(n): left_out(rng.normal(size=20), log_memory=0.1 * rng.standard_t(4, 20)) for n in range(60)}
    blank = {f"blank {n}": left_out(rng.normal(size=20)) for n in range(9)}

    found = fit_errors(errors | blank)

    assert found.memory.scale == pytest.approx(0.1, rel=0.1)
    assert found.unknown_memory.scale == pytest.approx(2 * found.memory.scale, rel=1e-3)
    assert found.memory.freedom in (3, 4, 6)
    assert found.memory == fit_errors(errors).memory
    assert found.fitted_on == "1,380 runs of 69 publishers, and 1,200 memory peaks of 60 of them"
    assert fit_errors(blank).memory == error_models().memory


def test_a_large_publisher_counts_as_twenty_runs():
    """A thousand runs of one publisher that all err by 1 do not drown ten publishers that err by 0.1."""
    rng = np.random.default_rng(1)
    errors = {str(number): left_out(0.1 * rng.standard_normal(20)) for number in range(10)}
    loud = left_out(np.ones(1000))

    assert fit_errors(errors | {"loud": loud}).step.unseen < 0.15
    assert fit_errors(dict(list(errors.items())[:2])).step == error_models().step


def test_the_catalog_keeps_the_comment_of_its_errors(tmp_path, monkeypatch):
    """What --write writes is read as the models that were fitted, with the file's comment and the number of runs."""
    target = tmp_path / "errors.yaml"
    target.write_text(CATALOG_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(strangers_errors, "CATALOG_FILE", target)
    models = ErrorModels(
        step=ErrorModel(unseen=0.2, constants=0.5, freedom=6),
        memory=MemoryErrorModel(scale=0.1, freedom=3),
        unknown_memory=MemoryErrorModel(scale=0.3, freedom=30),
        fitted_on="1 runs of 1 publishers",
    )

    write_errors(models)

    assert validate_mapping(ErrorModels, read_mapping(target), file=str(target)) == models
    assert target.read_text(encoding="utf-8").startswith("# Errors of predictions")


def test_the_catalog_keeps_the_errors_of_each_source(tmp_path, monkeypatch):
    """What --write writes of a source is read as it was measured, to a hundredth of a percent."""
    target = tmp_path / "accuracy.yaml"
    monkeypatch.setattr(strangers_errors, "ACCURACY_FILE", target)
    monkeypatch.setattr(accuracy, "ACCURACY_FILE", target)
    figures = {"tuned_by": "user", "n": 7, "median_ape": 0.123456, "bias": -0.1, "after_one": None, "covered_95": 1.0}

    write_accuracy([("somebody", figures | {"memory_n": 0, "memory_median_ape": None})])
    (found,) = read_accuracy().sources

    assert (found.source, found.tuned_by, found.runs, found.peaks) == ("somebody", "user", 7, 0)
    assert (found.step_error, found.step_signed, found.inside_95) == (0.1235, -0.1, 1.0)
    assert (found.after_one, found.peak_error) == (None, None)
    assert target.read_text(encoding="utf-8").startswith("# Errors of predictions")


def test_an_error_after_one_run_is_that_of_another_configuration():
    """A repeat of the measured configuration leaves nothing to judge: no error, rather than one of zero."""
    repeated = [timed("readme"), timed("readme"), timed("readme", devices=16, config=ParallelConfig(dp=16))]
    other = timed("readme", config=ParallelConfig(dp=4, tp=2))

    assert error_after_one(repeated, np.log([1.1, 1.1, 1.3])) is None
    assert error_after_one(repeated, np.log([1.1, np.nan, 1.3])) is None
    # repeats 1.0 and 1.1 as long as predicted, the other configuration 1.2: errors of 1.2 and 1.2 / 1.1, either way
    found = error_after_one([*repeated, other], np.log([1.0, 1.1, 1.3, 1.2]))
    assert found == pytest.approx(np.sqrt(1.2 * 1.2 / 1.1) - 1)


ARGUMENTS = ("--measured", str(MEASURED), "--workers", "1", "--seeds", "1", "--trials", "3", "--profiles", "mindspeed")


def test_the_program_predicts_and_tunes_what_it_left_out(capsys):
    """Both tables hold the source; Meshtune is searched with the right profile and with another."""
    status = main([*ARGUMENTS, "--searchers", "meshtune,prior,random", "--json"])
    found = json.loads(capsys.readouterr().out)
    (predicted,), (group,) = found["predicted"], found["tuned"]

    assert status == 0
    assert predicted["source"] == group["source"] == "ultrascale-playbook"
    assert 0 <= predicted["covered_68"] <= predicted["covered_95"] <= 1
    assert set(group["regimes"]) == {
        *("meshtune, right profile", "meshtune, another", "prior, right profile", "prior, another", "random")
    }
    assert set(group["by_profile"]) == {"nanotron", "mindspeed"}
    assert found["tuned_overall"] == found["tuned_by_source"]["ultrascale-playbook"]
    of_ranges = group["ranges"]["meshtune, right profile"]
    assert set(of_ranges) == {"after_4", "after_8"}
    for figures in of_ranges.values():
        assert 0 < figures["log_ratio"] < figures["whole_log_ratio"]
        assert figures["inside"] + figures["slower"] <= 1
        assert 0 < figures["told"] < 0.5


def test_ranges_are_held_against_what_was_measured():
    """Of four untried candidates one is slower than its range, whose chance was told, and one faster."""
    rng = np.random.default_rng(0)
    regular = np.log(2.0) + 0.1 * rng.standard_normal((4000, 4))
    drawn = StepDraws(log_step_s=regular + 3.0 * (rng.random(regular.shape) < 0.2), log_regular_s=regular)

    found = ranges_against(drawn, np.array([2.0, 2.1, 6.0, 1.0]))

    assert (found["inside"], found["slower"], found["slower_told"], found["whole_inside"]) == (0.5, 0.25, 1.0, 0.75)
    assert found["told"] == pytest.approx(0.2 + 0.8 * 0.025, abs=0.02)
    assert found["log_ratio"] == pytest.approx(0.392, abs=0.02)
    assert found["whole_log_ratio"] == pytest.approx(3.2, abs=0.2)


def test_profiles_say_whom_they_have_seen():
    """Sources of a fit, of copied constants and of peaks count, under the names of their publishers."""
    assert has_seen("nanotron", "ultrascale-playbook")
    assert has_seen("gpt-neox", "vtrain")
    assert has_seen("internevo", "internevo")
    assert not has_seen("gpt-neox", "bigscience")
    assert not has_seen("unknown", "vtrain")


def test_few_publishers_do_not_write_the_catalog(capsys):
    """An error model of one publisher is refused before anything is fitted, and the catalog stays as it is."""
    before = CATALOG_FILE.read_bytes()

    assert main([*ARGUMENTS, "--write"]) == 2
    assert "--write: needs all publishers, and at least 5 of them" in capsys.readouterr().err
    assert CATALOG_FILE.read_bytes() == before
