"""The sampler as a package of OptunaHub, loaded by its own loader from the folder that would be handed in."""

import pytest
import yaml
from optuna import create_study

from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import ROOT

REGISTRY = ROOT / "docs" / "examples" / "optunahub"
PACKAGE = "samplers/meshtune"


def test_the_package_is_loaded_and_finds_the_fastest(tmp_path):
    """OptunaHub's loader gives the sampler, which ends a study at confidence with the fastest configuration."""
    optunahub = pytest.importorskip("optunahub", reason="pip install optunahub")
    (tmp_path / "study.yaml").write_text(study(), encoding="utf-8")

    module = optunahub.load_local_module(PACKAGE, registry_root=str(REGISTRY))
    sampler = module.make_sampler(module.load_study(tmp_path / "study.yaml"), stop_when_confident=True)
    own = create_study(sampler=sampler)
    own.optimize(lambda trial: step_time_s(sampler.suggest(trial)), n_trials=60)

    assert module.__name__ == "optunahub_registry.package.samplers.meshtune"
    assert isinstance(sampler, module.ThompsonSampler)
    assert len(own.trials) < 60
    assert own.user_attrs["p_star"] > 0.9
    assert own.best_value == min(trial.value for trial in own.trials)


def step_time_s(config):
    """A world that likes few pipeline stages."""
    return 1.0 + 0.2 * (config.pp - 1) + 0.05 * (config.tp - 1) + 0.01 * config.mbs


def test_its_page_says_what_the_registry_asks_for():
    """The front matter of README.md has the keys of OptunaHub's template, and the files that it wants are there."""
    text = (REGISTRY / PACKAGE / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---\n")[1])

    assert head.keys() == {"author", "title", "description", "tags", "optuna_versions", "license"}
    assert head["license"] == "Apache-2.0"
    assert (REGISTRY / PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert all(f"\n## {section}\n" in text for section in ("Abstract", "APIs", "Installation", "Example"))
