"""One file alone reaches into what Optuna keeps to itself, so that a new version of Optuna is met in one place."""

import ast
import re
from collections.abc import Mapping

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tests.unit.test_import_order import imports_in, sources_of_the_house
from tuner.search.optuna_inside import contains, create_trial_in, storage_of, study_id_of, trial_id_of

INSIDE = "tuner/search/optuna_inside.py"


@pytest.fixture(scope="module")
def study():
    """A study with one trial that has ended."""
    made = optuna.create_study(storage=InMemoryStorage())
    made.add_trial(create_trial(value=1.0))
    return made


def private_names(study):
    """Names that Optuna's studies, trials, storages and distributions keep to themselves."""
    objects = (study, study.trials[0], study.ask(), study._storage, *study._storage.get_all_studies())
    kinds = (FrozenTrial, Trial, RDBStorage, JournalStorage, IntDistribution, FloatDistribution)
    owners = {each for kind in (*map(type, objects), *kinds, CategoricalDistribution) for each in kind.mro()}
    of_optuna = (vars(each) for each in owners if each.__module__.startswith("optuna."))
    # the cache in front of a database holds the database itself
    names = {"_backend"}.union(*of_optuna, *map(vars, objects))
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


def reaches(sources: Mapping[str, str], names: set[str]) -> list[str]:
    """Find attributes with such names of anything but `self` and `cls`, and imports of Optuna's private modules."""
    found = []
    for path, source in sources.items():
        if names.isdisjoint(re.findall(r"\b_\w+", source)) and "optuna" not in source:
            continue  # to parse every file takes seconds
        for node in ast.walk(ast.parse(source, filename=path)):
            is_named = isinstance(node, ast.Attribute) and node.attr in names
            if is_named and ast.unparse(node.value) not in ("self", "cls"):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
        found += [
            f"{item.where}: {item.target}"
            for item in imports_in(path, source)
            if item.library == "optuna" and any(part.startswith("_") for part in item.target.split("."))
        ]
    return found


def test_no_other_file_reaches_into_optuna(study):
    """All of it goes through the functions of one file."""
    others = {path: source for path, source in sources_of_the_house().items() if path != INSIDE}

    assert reaches(others, private_names(study)) == []
    assert reaches({INSIDE: sources_of_the_house()[INSIDE]}, private_names(study)) != []


@pytest.mark.parametrize(
    "source",
    [
        "def note(study): return study._study_id",
        "def note(trial): trial._trial_id = 3",
        "class Store:\n    def note(self): return self._study._storage",
        "def note(study): study.storage._backend.engine.dispose()",
        "def note(distribution): return distribution._contains(1.0)",
        "from optuna.storages._cached_storage import _CachedStorage",
        "def late():\n    from optuna.study import _frozen",
    ],
)
def test_the_fence_can_fail(study, source):
    """Each way of reaching in is found."""
    assert len(reaches({"tuner/run/loop.py": source}, private_names(study))) == 1


def test_identifiers_are_those_of_the_storage(study):
    """They are what Optuna's public, slower ways return."""
    storage = storage_of(study)

    assert study_id_of(study) == storage.get_study_id_from_name(study.study_name)
    assert [study_id_of(each) for each in storage.get_all_studies()] == [study_id_of(study)]
    number = storage.get_trial_id_from_study_id_trial_number(study_id_of(study), 0)
    assert trial_id_of(study.trials[0]) == number


def test_a_created_trial_knows_its_identifier(study):
    """The trial is in the storage as it was given, under the identifier that it now has."""
    trial = create_trial(state=TrialState.RUNNING, user_attrs={"a": 1})
    create_trial_in(storage_of(study), study, trial)

    assert storage_of(study).get_trial(trial_id_of(trial)).user_attrs == {"a": 1}


def test_a_distribution_contains_its_values():
    """Values of steps that it has are held, others are not."""
    distribution = IntDistribution(1, 8, log=True)

    assert [contains(distribution, value) for value in (0.0, 1.0, 8.0, 9.0)] == [False, True, True, False]
