"""Pins of a study whose framework shards by hand: they leave the candidates whose degrees and flags say them."""

import pytest
import yaml

from hardware.io.errors import ConfigError
from tuner import rank
from tuner.study_file.config import load_study

STUDY = {
    "name": "pinned",
    "model": "llama-7b",
    "cluster": {"name": "dgx-h100", "hosts": 1},
    "job": {"sequence_length": 512, "global_batch_size": 32},
    "space": {"pp": [1], "cp": [1], "up": [1, 2], "vpp": [1], "tp": [1, 2, 4], "mbs": [1, 2]},
    "trial": {"backend": "command", "command": ["python", "train.py", "{flags}"], "flags": "megatron"},
}
COLUMNS = {"op": "*.dense_mlp.up", "dim": "ffn", "axis": "tp"}
SEQUENCE = {"op": "layers.*.dense_mlp.norm", "dim": "sequence", "axis": "tp"}
TOKENS = {"op": "*.dense_mlp.up", "dim": "sequence", "axis": "tp"}


@pytest.fixture
def load(tmp_path):
    """The study with some pins, and with changes of its space."""

    def load_with(*pins, **space):
        keys = STUDY | {"planner": {"pins": list(pins)}, "space": STUDY["space"] | space}
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
        return load_study(tmp_path / "study.yaml", storage="sqlite:///:memory:")

    return load_with


def candidates(study):
    """The degrees and sequence parallelism of all candidates."""
    space = study.problem.subject.space(study.problem.options, current=None)
    found = map(space.grid.config, range(len(space.grid)))
    return {(config.tp, config.up, config.sequence_parallel) for config in found}, space


def test_a_pin_that_the_flags_say_leaves_all(load):
    """Columns of the first weight lie along tp in every plan by hand, so that the pin removes nothing."""
    found, space = candidates(load(COLUMNS, sequence_parallel=[False, True]))
    without, _ = candidates(load(sequence_parallel=[False, True]))

    assert found == without
    assert {tp for tp, _, _ in found} == {1, 2, 4}
    assert "pins" not in space.removed


def test_a_pin_of_the_sequence_moves_a_flag(load):
    """Along tp a norm's sequence is cut by sequence parallelism alone; candidates without tp have no such axis."""
    study = load(SEQUENCE, sequence_parallel=[False, True])
    found, space = candidates(study)
    without, _ = candidates(load(sequence_parallel=[False, True]))

    assert {tp for tp, _, _ in found} == {1, 2, 4}
    assert found == {each for each in without if each[0] == 1 or each[2]}
    assert found < without
    assert space.removed["pins"] > 0
    best = next(row for row in rank(study, top=100) if row["tp"] > 1)
    assert best["sequence_parallel"] is True


def test_a_pin_that_no_flag_says_is_refused(load):
    """A cut that Megatron never makes is named, with what its flags can say."""
    study = load(TOKENS, sequence_parallel=[False, True])

    with pytest.raises(ConfigError, match=r"planner.pins\[0\] = .*holds in no plan by hand.*sequence_parallel"):
        candidates(study)


def test_reasons_name_the_pins(load):
    """What keeps a configuration out is told as for rules, and an unknown operator by the planners' own message."""
    study = load(SEQUENCE, sequence_parallel=[False, True])
    options, subject = study.problem.options, study.problem.subject
    space = subject.space(options, current=None)
    grid = candidates(load(sequence_parallel=[False, True]))[1].grid
    left_out = next(one for one in map(grid.config, range(len(grid))) if one.tp > 1 and not one.sequence_parallel)

    assert subject.reasons_against(options, left_out, space) == {"pins": "the plan by hand must hold planner.pins"}
    assert any(line.split()[:1] == ["pins"] for line in subject.space_lines(options, space))
    with pytest.raises(ConfigError, match=r"planner.pins\[0\].*nothing_like_it"):
        candidates(load({"op": "nothing_like_it", "dim": "ffn"}))
