"""Key `facts:` of a study: its mistakes, and what goes before it."""

import numpy as np
import pytest
import yaml

from hardware.io.errors import ConfigError
from tuner.knobs.effects import effects_of, predict
from tuner.study_file.config import load_study
from tuner.study_file.meaning import first_difference

STUDY = {
    "name": "facts",
    "model": "mixtral-8x7b",
    "cluster": {"name": "dgx-h100", "hosts": 2},
    "job": {"sequence_length": 4096, "global_batch_size": 64},
}


def load(tmp_path, *overrides, **keys):
    """The study with some keys."""
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | keys))
    return load_study(tmp_path / "study.yaml", overrides=overrides)


def runtime(request):
    """The profile under which a study is predicted."""
    return request.problem.setting.runtime


def test_facts_go_before_the_profile(tmp_path):
    """What a study states holds in its predictions, from its file and from --set; the rest is the profile's."""
    found = runtime(load(tmp_path, "facts.overlaps_experts=true", facts={"dispatcher": "hybridep"}))

    assert found.stated == (("dispatcher", "hybridep"), ("overlaps_experts", True))
    assert (found.deduplicates_tokens, found.overlaps_experts, found.overlaps_tensor) == (True, True, False)
    assert runtime(load(tmp_path)).stated == ()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dispacher": "alltoall"}, r"study\.yaml: facts\.dispacher: is no fact of a run; did you mean 'dispatcher'"),
        ({"dispatcher": "deep"}, r"study\.yaml: facts\.dispatcher = 'deep': .* did you mean 'deepep'"),
        ({"loss_chunks": 0}, r"study\.yaml: facts\.loss_chunks = 0: must be a whole number from 1 to 4,096; 1"),
        ({"dispatcher": None}, r"study\.yaml: facts\.dispatcher = 'None': is not among its values"),
    ],
)
def test_a_wrong_fact_is_told(tmp_path, facts, message):
    """An unknown fact or value comes with its place and the nearest valid choice."""
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, facts=facts)


def test_a_knob_in_use_goes_before_the_facts(tmp_path):
    """A value in use that a study states for a known knob says what its program does."""
    knobs = {"knobs": [{"catalog": "moe_dispatcher", "today": "deepep"}]}
    request = load(tmp_path, facts={"dispatcher": "alltoall", "gradient_bytes": 2}, space=knobs)

    assert runtime(request).stated == (("dispatcher", "deepep"), ("gradient_bytes", 2))
    assert runtime(request).deduplicates_tokens


def test_a_knob_begins_with_the_facts(tmp_path):
    """Without a stated value in use, a knob's is the one that the facts say, among those alike too."""
    request = load(tmp_path, facts={"dispatcher": "hybridep"}, space={"knobs": ["moe_dispatcher"]})

    assert request.problem.knobs[0].today == "hybridep"


def test_a_knobs_gain_is_that_of_its_fact(tmp_path):
    """The effect of a knob's value is the difference of two predictions, with and without its fact."""
    request = load(tmp_path, space={"knobs": ["moe_dispatcher", "precision_aware_optimizer", "expandable_segments"]})
    grid = request.problem.space().grid
    predicted = predict(request.problem.setting, grid)
    for knob, known in zip(request.problem.knobs, request.problem.known_knobs, strict=True):
        value = knob.values[-1]
        told = dict(known.value_of(value).facts)
        other = load(tmp_path, facts=told).problem.setting
        with_fact = predict(other, grid)
        effects = effects_of(known, [value], knob.today, predicted)

        assert effects.step[:, 0] == pytest.approx(np.log(with_fact.unstalled_s / predicted.unstalled_s))
        need, base = with_fact.memory.needed_bytes, predicted.memory.needed_bytes
        assert effects.memory[:, 0] == pytest.approx(np.log(need / base))
        assert abs(effects.step).max() + abs(effects.memory).max() > 0.01


def test_studies_from_before_go_on(tmp_path):
    """A study without facts means what it meant; with a fact it means something else."""
    plain, stated = load(tmp_path).meaning, load(tmp_path, facts={"first_moment_bytes": 2}).meaning

    assert "first_moment_bytes" not in plain["runtime"]
    assert "stated" not in stated["runtime"]
    assert first_difference(plain, stated) == ("runtime.first_moment_bytes", None, 2)
    assert first_difference(plain, load(tmp_path, facts={"first_moment_bytes": 4}).meaning) is None


def test_a_step_of_the_users_own_has_no_facts(tmp_path):
    """The program itself says what it does."""
    (tmp_path / "own.py").write_text("def make():\n    raise AssertionError\n")
    own = {key: value for key, value in STUDY.items() if key != "job"} | {"model": {"jax": "own:make"}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(own | {"facts": {"dispatcher": "alltoall"}}))

    with pytest.raises(ConfigError, match="facts: belongs to models of the catalog"):
        load_study(tmp_path / "study.yaml")
