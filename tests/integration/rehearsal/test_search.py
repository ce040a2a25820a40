"""A whole study under Ray, whose candidates are rehearsed before they are tried."""

from __future__ import annotations

import pytest

from docs.site.json_keys import JSON_KEYS
from tests.support.rehearsal.heads_study import write_study
from tests.support.studies.command_line import in_process

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_layout_that_the_program_refuses_never_becomes_a_trial(tmp_path):
    """The program cannot split 6 heads over 4 or 8: without rehearsals such trials fail, with them there is none, and
    `status` and `rank` say why, in the program's words.
    """
    study = write_study(tmp_path)

    plain = in_process(
        "run", study, "--json", "--set", "search.rehearse=off", "--set", "name=other", cwd=tmp_path, timeout_s=900
    )
    done = in_process("run", study, "--json", cwd=tmp_path, timeout_s=900)

    assert plain.json["failed"] > 0
    assert done.json["failed"] == 0
    assert done.json["trials"] == 4
    status = in_process("status", study, "--json", cwd=tmp_path, timeout_s=300).json
    refused = [one for one in status["rehearsed"] if one["verdict"] == "refused"]
    assert refused
    assert all(one["config"]["tp"] >= 4 and "heads cannot be split" in one["error"] for one in refused)
    trials = in_process("trials", study, "--json", cwd=tmp_path, timeout_s=300).json["trials"]
    assert all(trial["config"]["tp"] <= 2 for trial in trials)
    ranked = in_process("rank", study, "--json", "--top", "100", cwd=tmp_path, timeout_s=300).json["configs"]
    last = ranked[-len(refused) :]
    assert all(any(one["config"].items() <= row.items() for row in last) for one in refused)
    assert not any(row["fits"] for row in last)


def test_leaders_are_rehearsed_once(tmp_path):
    """The first candidates of the ranking in their order, one row each; a second command tells the same and rehearses
    none of them, and `--again` all.
    """
    study = write_study(tmp_path)
    ranked = in_process("rank", study, "--json", "--top", "4", cwd=tmp_path, timeout_s=300).json["configs"]
    words = ("rehearse", study, "--leaders", "4", "--yes", "--json")

    first, second = (in_process(*words, cwd=tmp_path, timeout_s=600) for _ in range(2))

    assert first.json.keys() == JSON_KEYS["rehearse"]["with `--leaders` instead"].keys()
    rows = first.json["leaders"]
    assert [row["rank"] for row in rows] == [1, 2, 3, 4]
    assert [row["config"]["tp"] for row in rows] == [one["tp"] for one in ranked]
    assert [row["verdict"] for row in rows] == ["refused" if row["config"]["tp"] >= 4 else "accepted" for row in rows]
    assert first.status == second.status == int(any(row["verdict"] != "accepted" for row in rows))
    assert second.json == first.json
    assert "4 of them rehearsed before" in second.err
    again = in_process(*words, "--again", cwd=tmp_path, timeout_s=600)
    assert "rehearsed before" not in again.err


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--leaders", "3", "--config", "tp=2"), "--config"),
        (("--leaders", "3", "--ranks", "all"), "--ranks"),
        (("--leaders", "0"), "--leaders"),
        (("--again",), "--again"),
        (("--leaders", "3"), "rehearse"),
    ],
)
def test_options_that_contradict_are_refused(tmp_path, words, key):
    """Leaders are no configuration, and nothing runs that was not confirmed."""
    done = in_process("rehearse", write_study(tmp_path), *words, cwd=tmp_path)

    assert done.status == 2
    assert key in done.err
