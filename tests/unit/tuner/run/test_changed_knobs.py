"""Studies whose recommended knobs have changed since their trials ran."""

import json

import optuna
import pytest
import yaml

from hardware.io.errors import ConfigError
from tuner.run.studies import check_meaning
from tuner.storage.record import MEANING
from tuner.study_file.config import load_study

STUDY = {
    "name": "knobs",
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100"},
    "job": {"sequence_length": 4096, "global_batch_size": 64},
}


def load(tmp_path, *knobs):
    """The study with some known knobs."""
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"space": {"knobs": list(knobs)}}))
    return load_study(tmp_path / "study.yaml")


def test_a_trial_keeps_knobs_that_its_study_has_no_more(tmp_path):
    """What ran with a knob is answered for with it, and the study's own knobs have today's values beside it."""
    problem = load(tmp_path, "tp_comm_overlap").problem
    config = problem.config_of({"tp": 4, "dp": 2, "mbs": 1, "activation_offload": "core_attn"})

    assert dict(config.knobs) == {"tp_comm_overlap": False, "activation_offload": "core_attn"}
    assert (config.tp, config.dp) == (4, 2)
    assert problem.subject.export(config, "megatron", knobs=problem.knobs, known=str, module="").arguments


def test_a_refusal_names_the_knobs_of_before(tmp_path):
    """A study that would go on with other knobs is refused, with the names that bring its own back."""
    study = optuna.create_study()
    study.set_user_attr(MEANING, json.loads(json.dumps(load(tmp_path, "tp_comm_overlap", "manual_gc").meaning)))

    check_meaning(load(tmp_path, "tp_comm_overlap", "manual_gc"), study)
    with pytest.raises(ConfigError, match=r"space\.knobs.*its knobs were \[tp_comm_overlap, manual_gc\]"):
        check_meaning(load(tmp_path, "tp_comm_overlap"), study)
