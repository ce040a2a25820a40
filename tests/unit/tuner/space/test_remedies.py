"""What a study is told whose configurations all need too much memory, followed to the letter."""

import re
import shlex

import pytest

from tests.support.studies.broken_studies import study

H100S = "{name: dgx-h100, hosts: %d}"
JOB = "{sequence_length: 4096, global_batch_size: 64, precision: bf16%s}"
CASES = {
    "recompute is not opened": ("llama3-405b", 8, "megatron-core", "", ""),
    "recompute none alone": ("llama3-405b", 8, "megatron-core", "", "{recompute: [none]}"),
    "selective alone": ("llama3-405b", 8, "unknown", "", "{recompute: [selective]}"),
    "full is in the job already": ("llama3-70b", 1, "megatron-core", ", recompute: full", ""),
    "full, and no other choice": ("llama3-70b", 1, "nanotron", ", recompute: full", ""),
    "no recomputation is offered": ("llama3-70b", 1, "jax-reference", "", ""),
    "degrees are listed": ("llama3-8b", 1, "megatron-core", ", zero_stage: 0", "{tp: [1], pp: [1], cp: [1], up: [1]}"),
    "a listed degree beside the recomputation": (
        "llama3-8b",
        1,
        "megatron-core",
        ", recompute: none",
        "{recompute: [none], mbs: [32, 64]}",
    ),
    "listed experts": ("mixtral-8x7b", 1, "megatron-core", "", "{recompute: [none], tp: [1], pp: [1], ep: [1]}"),
    "both": ("llama3-70b", 1, "megatron-core", "", "{tp: [1], recompute: [none]}"),
    "far too large": ("llama3-405b", 1, "megatron-core", "", "{recompute: [none]}"),
}


def has_fitting(done):
    """Return whether `rank --json` has a configuration that is predicted to fit."""
    return any(config["fits"] for config in done.json["configs"])


@pytest.mark.parametrize("case", CASES)
def test_advice_that_is_followed_is_accepted_and_helps(meshtune, tmp_path, case):
    """The options that are told leave configurations that are predicted to fit, and none of them is told in vain."""
    model, hosts, runtime, job, space = CASES[case]
    keys = {"space": space} if space else {}
    path = tmp_path / "study.yaml"
    path.write_text(
        study(model=model, cluster=H100S % hosts, job=JOB % job, runtime=runtime, current=None, **keys),
        encoding="utf-8",
    )

    told = meshtune("space", path)
    changes = re.findall(r"note: some configurations may fit with (.*)", told.err)
    larger = re.findall(r"note: .*`meshtune rank STUDY (--hosts \d+)`", told.err)

    assert "0 of them may fit" in told.out
    assert len(changes) + len(larger) == 1
    rank = ("rank", path, "--json", "--top", "1000")
    for options in map(shlex.split, changes):
        assert has_fitting(meshtune(*rank, *options))
        for at in range(0, len(options), 2):
            assert not has_fitting(meshtune(*rank, *options[:at], *options[at + 2 :]))
    for options in larger:
        done = meshtune("rank", path, *options.split(), "--json")
        assert done.json["smallest_that_fits"] is not None, done.err


def test_nothing_is_simulated_where_nothing_fits(meshtune, tmp_path):
    """On hosts that share an adapter, whose leaders are simulated, `rank` speaks of none where there are none."""
    path = tmp_path / "study.yaml"
    cluster = "{name: v100-pcie, hosts: 1}"
    path.write_text(study(model="llama3-405b", cluster=cluster, job=JOB % "", current=None), encoding="utf-8")

    done = meshtune("rank", path)

    assert done.status == 1
    assert "nothing fits" in done.err
    assert "simulating" not in done.err
