"""`python -m benchmarks.strangers`: what is forgotten of a publisher, what a newcomer would state, and the program."""

import json
from dataclasses import replace

import pytest

from benchmarks.strangers.__main__ import main
from benchmarks.strangers.left_out import GUESSED_MEMORY, GUESSED_STEP, Without, profile_without, strange_setting
from costmodels.calibration.sources import publisher_of
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import CONSTANTS, find_prior, find_runtime
from tests.support.benchmark_runs import ROOT
from tests.support.settings.synthetic_runs import small_model, unmeasured_run

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


def test_sources_of_one_cluster_are_forgotten_together():
    """The second source of a publisher does not keep what the first one taught."""
    assert publisher_of("ultrascale-playbook-tp") == publisher_of("ultrascale-playbook") == "ultrascale-playbook"
    assert publisher_of("somebody") == "somebody"


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


def test_the_program_prints_tables(capsys):
    """Without --json it prints a line for each source and one for each kind of search."""
    assert main([*ARGUMENTS, "--searchers", "prior"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ultrascale-playbook ") for line in lines)
    assert any(line.strip().startswith("prior, another") for line in lines)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--searchers", "mehstune", "--searchers = 'mehstune': is no searcher; did you mean 'meshtune'?"),
        ("--profiles", "nanotorn", "--profiles = 'nanotorn': is no runtime profile; did you mean 'nanotron'?"),
        ("--sources", "vtrain", "--sources = 'vtrain': published none of these runs; valid: ultrascale-playbook"),
    ],
)
def test_a_mistaken_name_is_refused(option, value, words, capsys):
    """A searcher, a profile or a publisher that there is not ends the program with status 2 and the nearest one."""
    assert main([*ARGUMENTS, option, value]) == 2
    assert words in capsys.readouterr().err
