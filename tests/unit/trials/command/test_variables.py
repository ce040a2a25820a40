import re

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.studies.commanded_study import write_study
from tuner.study_file.config import load_study
from tuner.study_file.meaning import first_difference


def test_a_study_names_variables_of_the_environment(tmp_path, monkeypatch):
    """Their values come from the environment of the program that loads the study, and their names alone give a study
    its meaning. A study whose variables are not set loads, but does not run: one message names all of them.
    """
    path = write_study(tmp_path, trials=1)
    text = path.read_text(encoding="utf-8").replace('"{mbs}"]', '"{mbs}", "--hub={env:HUB_TOKEN}"]')
    path.write_text(text.replace("hunter2-canary", '"{env:OF_API}"'), encoding="utf-8")
    for name in ("HUB_TOKEN", "OF_API"):
        monkeypatch.delenv(name, raising=False)

    unset = load_study(path)
    with pytest.raises(ConfigError) as refused:
        unset.trials.backend.check()
    assert "not set: HUB_TOKEN, OF_API" in str(refused.value)
    assert "export HUB_TOKEN=... OF_API=..." in str(refused.value)

    meanings = []
    for value in ("one", ""):
        monkeypatch.setenv("HUB_TOKEN", value)
        monkeypatch.setenv("OF_API", value)
        study = load_study(path)
        study.trials.backend.check()
        plan = study.trials.backend.plan(ParallelConfig(dp=2), 0)
        assert dict(plan.variables) == {"HUB_TOKEN": value, "OF_API": value}
        meanings.append(study.meaning)
    assert meanings[0] == meanings[1] == unset.meaning


def test_a_study_stores_no_secret_of_its_command(tmp_path):
    """The meaning of a study has digests in place of the secrets in its words. They tell another value apart, and a
    study that was stored with the words themselves goes on.
    """
    path = write_study(tmp_path, trials=1)
    text = path.read_text(encoding="utf-8")
    meanings = []
    for secret in ("canary-1", "canary-2"):
        path.write_text(text.replace('"{mbs}"]', f'"{{mbs}}", --hub-token, {secret}]'), encoding="utf-8")
        meanings.append(load_study(path).meaning)
        assert secret not in str(meanings[-1])

    key, old, new = first_difference(*meanings)
    assert (key, old[:-1]) == ("trial.command", new[:-1])
    words = [*old[:-1], "canary-1"]
    stored = meanings[0] | {"trial": meanings[0]["trial"] | {"command": words}}
    assert first_difference(stored, meanings[0]) is None
    assert "canary" not in str(first_difference(stored, meanings[1]))


def test_a_path_of_traces_names_no_variable(tmp_path):
    """Traces are looked for by their path after the trial: a variable in it is refused."""
    path = write_study(tmp_path, trials=1)
    traces = 'profile: "{env:HOME}/{trial}"\n  logs: logs'
    path.write_text(path.read_text(encoding="utf-8").replace("logs: logs", traces), encoding="utf-8")

    with pytest.raises(ConfigError, match=re.escape("has no value for {env:HOME}")):
        load_study(path)
