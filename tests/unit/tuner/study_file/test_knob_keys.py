import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.commanded_study import MODEL
from trials.knobs.places import Place
from tuner.study_file.config import load_study
from tuner.study_file.knob_keys import KnobKeys, build_knobs

STUDY = """
name: knobs
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
space: {{knobs: [{knobs}]}}
trial: {trial}
"""
COMMAND = "{backend: command, command: [python, train.py, '{knobs}'], launch: once, log: megatron}"


def knobs_of(*entries):
    """The knobs of some entries."""
    return build_knobs([KnobKeys.model_validate(entry) for entry in entries])


def load(tmp_path, knobs, trial=COMMAND):
    """The study with these knobs."""
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(model=MODEL, knobs=knobs, trial=trial), encoding="utf-8")
    return load_study(path)


def test_what_is_left_out_has_a_meaning():
    """A knob without values is a switch that is off today, and the first value is today's."""
    switch, size = knobs_of({"name": "switch", "flag": "--switch"}, {"name": "size", "values": [3, 1, 2]})

    assert (switch.values, switch.today) == ((False, True), False)
    assert size.today == 3
    assert switch.place == Place(flag="--switch")


def test_null_may_be_the_value_of_today():
    """A variable that is absent today is null among the values."""
    (knob,) = knobs_of({"name": "k", "values": ["a", None], "today": None, "environment": "K"})

    assert knob.today is None
    assert knob.code_today == 1


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"first": 1, "last": 16, "factor": 2}, (1, 2, 4, 8, 16)),
        ({"first": 0, "last": 1, "step": 0.25}, (0, 0.25, 0.5, 0.75, 1)),
        ({"first": 3, "last": 10, "step": 3}, (3, 6, 9)),
    ],
)
def test_a_range_is_a_list_of_numbers(keys, values):
    """Ranges count by a factor or by a step, up to their last value, and whole numbers stay whole."""
    (knob,) = knobs_of({"name": "k", "range": keys})

    assert knob.values == values
    assert knob.is_ordered


@pytest.mark.parametrize(
    ("entries", "key", "rule"),
    [
        ([{"name": "Upper"}], "space.knobs.0.name", "must be small letters"),
        ([{"name": "tp"}], "space.knobs.0.name", "stands for something else"),
        ([{"name": "trial"}], "space.knobs.0.name", "stands for something else"),
        ([{"name": "a"}, {"name": "a"}], "space.knobs.1.name", "is the name of another knob"),
        ([{"name": "a", "values": [1]}], "space.knobs.0.values", "must be from 2 to 64 values"),
        ([{"name": "a", "values": [1, 1.0]}], "space.knobs.0.values", "holds a value twice"),
        ([{"name": "a", "values": [0, False]}], "space.knobs.0.values", "holds a value twice"),
        ([{"name": "a", "values": [1.0, float("inf")]}], "space.knobs.0.values", "must be finite"),
        ([{"name": "a", "values": [1, 2], "today": 3}], "space.knobs.0.today", "is none of the values"),
        ([{"name": "a", "values": [1, 2], "range": {"first": 1, "last": 2, "step": 1}}], "range", "beside values"),
        ([{"name": "a", "range": {"first": 1, "last": 2}}], "range", "needs either factor or step"),
        ([{"name": "a", "values": [1, 1e90]}], "space.knobs.0.values", "must be finite, from -1e+18 to 1e+18"),
        ([{"name": "a", "range": {"first": 1, "last": 1e90, "factor": 10}}], "range", "from -1e+18 to 1e+18"),
        ([{"name": "a", "range": {"first": 2, "last": 1, "step": 1}}], "range", "must end above"),
        ([{"name": "a", "range": {"first": 0, "last": 4, "factor": 2}}], "range.first", "must begin above 0"),
        ([{"name": "a", "range": {"first": 1, "last": 1e6, "step": 1}}], "range", "more than 64 values"),
        ([{"name": "a", "flag": "no flag"}], "space.knobs.0.flag", "is no flag"),
        ([{"name": "a", "flag": {"maybe": "--x"}}], "space.knobs.0.flag", "is none of the values"),
        ([{"name": "a", "flag": {"true": "'"}}], "space.knobs.0.flag", "cannot be split"),
        ([{"name": "a", "environment": "A=B"}], "space.knobs.0.environment", "is no name"),
        ([{"name": "a", "file": "ds"}], "space.knobs.0.key", "is required beside"),
        ([{"name": "a", "when": "tpp > 1"}], "space.knobs.0.when", "did you mean 'tp'?"),
        ([{"name": "a", "when": "b == true"}, {"name": "b"}], "space.knobs.0.when", "no knob that stands before"),
        ([{"name": "a", "affects": ["tp comunication"]}], "space.knobs.0.affects.0", "tp communication"),
        ([{"name": "a", "flag": "--x"}, {"name": "b", "flag": "--x"}], "space.knobs.1.flag", "by the knob a too"),
        (
            [
                {"name": f"k{n}", "range": {"first": 1, "last": 64, "step": 1}, "when": f"k{n - 1} > 1" if n else ""}
                for n in range(3)
            ],
            "space.knobs",
            "more than 4,096 combinations",
        ),
    ],
)
def test_mistakes_are_told_with_their_key(entries, key, rule):
    """Each mistake names the knob by its position, the key, and the rule or the nearest valid choice."""
    with pytest.raises(ConfigError) as caught:
        knobs_of(*entries)

    assert key in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "trial", "words"),
    [
        ("{name: a, flag: --a}", "{backend: command, command: [python], launch: once}", "no argument of the command"),
        ("{name: a}", COMMAND, "goes nowhere"),
        ("{name: a, file: ds, key: x}", COMMAND, "is no file of trial.files"),
        ("{name: a, environment: A}", COMMAND[:-1] + ", environment: {A: b}}", "is set by trial.environment too"),
        ("{name: a, flag: --a}", "{backend: torch}\nruntime: torch-reference", "need trials that can set them"),
        ("{name: a, flag: --a}", "{backend: simulated, proxy: {hosts: 1}}", "cannot be searched by smaller jobs"),
        ("{name: a, flags: --a}", COMMAND, "did you mean 'flag'?"),
    ],
)
def test_knobs_that_no_trial_would_set_are_refused(tmp_path, knobs, trial, words):
    """A knob whose value would not reach the command, or whose trials take none, is refused when the study is read."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, knobs, trial)

    assert words in str(caught.value)


def test_a_knob_is_a_placeholder_too(tmp_path):
    """The value of a knob takes the place of its name in the command and in variables."""
    trial = "{backend: command, command: [python, '--x={a}'], environment: {Y: '{a}'}, launch: once}"
    config = load(tmp_path, "{name: a, values: [true, 2.0, x]}", trial)
    current = config.problem.with_knobs(config.problem.config_of({"tp": 1, "dp": 2, "pp": 1, "a": "x"}))
    plan = config.trials.backend.plan(current, 3)

    assert dict(plan.values)["a"] == "x"
    assert config.problem.dimensions[-1] == "a"
