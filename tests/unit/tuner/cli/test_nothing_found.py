import pytest

from tests.support.studies.command_line import FASTEST, assert_users_mistake


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("command", ["space", "rank", "run", "best", "export"])
def test_no_candidate_fits(meshtune, hopeless, command):
    """Where nothing fits, each command ends 1, still with its JSON, and tells people where to look."""
    more = ("--to", "json") if command == "export" else ()

    told, shown = meshtune(command, hopeless, *more, "--json"), meshtune(command, hopeless, *more)

    assert (told.status, shown.status) == (1, 1)
    assert told.json
    words = "0 of them may fit" if command == "space" else "No configuration works; `meshtune space` explains why"
    assert words in shown.out + shown.err


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_study_that_has_never_run(meshtune, simulated, tmp_path, command):
    """What is about trials is refused before the first one, with the command that starts them; no database appears."""
    done = meshtune(command, simulated)

    assert_users_mistake(done, "study.yaml", "name = 'small'", f"`meshtune run {simulated}`")
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize("command", [("best",), ("export", "--to", "json")], ids=lambda command: command[0])
def test_the_best_before_any_trial_is_predicted(meshtune, simulated, tmp_path, command):
    """Before any trial the best is what `rank` puts first, said to be predicted; no database appears."""
    first = meshtune("rank", simulated, "--top", 1, "--json").json["configs"][0]

    done = meshtune(command[0], simulated, *command[1:], "--json")

    assert done.status == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]
    if command[0] == "best":
        assert done.json["source"] == "predicted"
        assert done.json["config"] == {name: first[name] for name in (*FASTEST, "assignment")}
        assert done.json["gain_over_current"] >= 1
    else:
        assert done.err == "note: this configuration is predicted, not measured\n"


def test_another_study_in_the_same_database(finished, meshtune, simulated):
    """A database that holds other studies counts as having none of this one."""
    _, storage, _ = finished

    assert_users_mistake(meshtune("status", simulated, "--storage", storage), "no trials in its storage yet")
