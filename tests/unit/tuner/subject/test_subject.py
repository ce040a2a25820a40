"""Claims that hold of every subject of a study, whatever it is."""

import json
import sys
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hardware.io.errors import ConfigError
from tuner.study_file.config import load_study
from tuner.subject.ability import Ability

ROOT = Path(__file__).parents[4]
STUDIES = ROOT / "configs/studies"

PROGRAM = """
import jax
import jax.numpy as jnp


def step():
    def train(params, batch):
        grads = jax.grad(lambda params: jnp.sum((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2))(params)
        return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return train, ({"up": array(32, 64), "down": array(64, 32)}, array(8, 32)), ("params",)
"""


@cache
def load(name):
    """Load a study of the repository once for all tests."""
    return load_study(STUDIES / name)


@pytest.fixture(scope="module")
def own_study(tmp_path_factory):
    """Study of a step in JAX, on two devices."""
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("own")
    (folder / "two_layers.py").write_text(PROGRAM, encoding="utf-8")
    keys = {"name": "own", "model": {"jax": "two_layers:step"}, "trial": {"backend": "simulated"}}
    cluster = {"name": "dgx-h100", "hosts": 1, "devices_per_host": 2}
    (folder / "study.yaml").write_text(json.dumps(keys | {"cluster": cluster}), encoding="utf-8")
    yield load_study(folder / "study.yaml")
    sys.modules.pop("two_layers", None)
    sys.path[:] = [place for place in sys.path if place != str(folder)]


@cache
def space_of(study):
    """Enumerate the space of a study once for all tests."""
    return study.problem.space()


class SubjectContract(ABC):
    """Tests of one subject; a class for each subject says which study has it."""

    LACKS: frozenset[Ability]
    TARGET: str

    @pytest.fixture
    @abstractmethod
    def study(self):
        """Study of the subject."""

    @pytest.fixture
    def space(self, study):
        """Space of the study."""
        return space_of(study)

    def test_a_candidate_is_launchable_and_nothing_stands_against_it(self, study, space):
        """A candidate is accepted by the rules and by `--config`."""
        chosen = space.grid.config(0)

        assert study.problem.subject.reasons_against(study.problem.options, chosen, space) == {}
        study.problem.subject.check_launchable(study.problem.options, chosen, current=None, missing="")

    def test_another_number_of_devices_cannot_be_launched(self, study, space):
        """A configuration of devices that are not there has a reason against it, and `--config` refuses it."""
        chosen = type(space.grid.config(0))(dp=3 * study.problem.cluster.num_devices)

        assert study.problem.subject.reasons_against(study.problem.options, chosen, space)
        with pytest.raises(ConfigError, match="--config"):
            study.problem.subject.check_launchable(study.problem.options, chosen, current=None, missing="")

    def test_every_candidate_is_predicted(self, study, space):
        """Step times are the sums of their parts, memory is that of the space, and features are rows."""
        found = study.problem.subject.forecast(space.grid, space.memory)
        parts_s = sum(found.estimate.breakdown_s.values())

        np.testing.assert_allclose(parts_s, found.estimate.step_time_s)
        np.testing.assert_array_equal(
            study.problem.subject.forecast(space.grid).memory.peak_bytes, space.memory.peak_bytes
        )
        assert len(study.problem.subject.features(space.grid, found.estimate)) == len(space.grid)
        assert len(
            study.problem.subject.part_lines({key: float(of[0]) for key, of in found.estimate.breakdown_s.items()}, 1.0)
        )

    def test_the_prior_is_of_every_candidate(self, study, space):
        """Before any trial the posterior predicts each candidate, as the forecast does."""
        grid = space.grid.take(np.arange(min(len(space.grid), 40)))
        predicted = study.problem.subject.prior(grid, None).predicted

        np.testing.assert_allclose(predicted.step_time_s, study.problem.subject.forecast(grid).estimate.step_time_s)

    def test_what_it_lacks_is_told_in_a_sentence(self, study):
        """Each lacking ability has a reason, and no other has."""
        assert {ability for ability in Ability if study.problem.subject.refusal(ability)} == self.LACKS
        assert {ability for ability in Ability if not study.problem.subject.has(ability)} == self.LACKS

    def test_tokens_and_errors_are_told_where_they_are_known(self, study, space):
        """A throughput is there with tokens, errors with constants of a profile, and utilisation always."""
        subject = study.problem.subject

        assert (subject.throughput(1.0) is None) is (Ability.TOKENS in self.LACKS)
        assert (subject.uncertainty(space.grid.take(np.arange(1))) is None) is (Ability.LAYERS in self.LACKS)
        assert subject.utilisation(1.0) == pytest.approx(2 * subject.utilisation(2.0))

    def test_a_setting_is_there_or_refused(self, study):
        """A subject without a framework refuses its setting as the user's mistake; others have it on the cluster."""
        if Ability.FLAGS in self.LACKS:
            with pytest.raises(ConfigError, match="and this needs a model of the catalog"):
                _ = study.problem.subject.setting
        else:
            assert study.problem.subject.setting.cluster == study.problem.subject.cluster
            assert study.problem.subject.with_setting(study.problem.setting).setting == study.problem.setting
        assert study.problem.subject.on_cluster(study.problem.cluster).cluster == study.problem.cluster

    def test_it_is_exported_to_its_own_targets_alone(self, study, space):
        """A target of another kind of subject is refused by its option, and the right one has a text."""
        chosen = space.grid.config(0)
        study.problem.subject.check_target(self.TARGET)
        found = study.problem.subject.export(chosen, self.TARGET, knobs=(), known=lambda: "1 s", module="sharded")

        assert found.text
        assert (study.problem.subject.shardings(chosen, study.name) is None) is (Ability.SHARDINGS in self.LACKS)
        for target in ("torch", "megatron"):
            if (target == "torch") is (Ability.SHARDINGS in self.LACKS):
                with pytest.raises(ConfigError):
                    study.problem.subject.check_target(target)

    @pytest.mark.usefixtures("space")
    def test_its_meaning_and_what_is_stored_are_json(self, study):
        """A resumed study compares the first with its own, and the second comes back as it was."""
        meaning = study.problem.subject.meaning(study.problem.options, study.problem.planning, ())
        stored = json.loads(json.dumps(study.problem.subject.as_stored()))

        assert json.loads(json.dumps(meaning)).keys() >= {"model", "cluster", "space"}
        assert bool(stored) is (Ability.SHARDINGS not in self.LACKS)
        study.problem.subject.restore(stored)
        assert json.loads(json.dumps(study.problem.subject.as_stored())) == stored

    def test_tables_and_words_are_of_its_dimensions(self, study, space):
        """Columns are dimensions of the grid, and the first line on a space counts its candidates."""
        assert {*study.problem.subject.columns(space.grid.dimensions)} <= {*space.grid.dimensions}
        assert f"{len(space.grid):,}" in study.problem.subject.space_lines(study.problem.options, space)[0]
        assert "9 devices" in study.problem.subject.title("9 devices")


class TestCatalogSubject(SubjectContract):
    """Model of the catalog."""

    LACKS, TARGET = frozenset({Ability.SHARDINGS}), "megatron"

    @pytest.fixture
    def study(self):
        """Study of a model of the catalog."""
        return load("llama3-8b-dgx-h100.yaml")


class TestReplaySubject(SubjectContract):
    """Published rows."""

    LACKS, TARGET = frozenset({Ability.SHARDINGS, Ability.RULES, Ability.SIZES, Ability.KNOBS}), "nanotron"

    @pytest.fixture
    def study(self):
        """Study that replays a published sweep."""
        return load("ultrascale-llama-8b-128.yaml")

    def test_the_rows_are_there(self, study):
        """The rows that trials replay are told, and peaks have the meaning of their source."""
        assert len(study.problem.subject.rows) > 100
        assert study.problem.subject.measured_setting.memory != "device"


@pytest.mark.slow  # the quick lane has no JAX
class TestOwnStepSubject(SubjectContract):
    """Step of the user's own."""

    LACKS, TARGET = frozenset(Ability) - {Ability.SHARDINGS, Ability.RULES}, "jax"

    @pytest.fixture
    def study(self, own_study):
        """Study of a step in JAX."""
        return own_study
