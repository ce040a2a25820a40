"""The reference pages against what they are made from, and the schema against the check that studies go through."""

import json
from pathlib import Path

import jsonschema
import pytest

from docs.site.pages import PAGES, schema_text, written
from docs.site.regions import names_of
from docs.site.study_file import STUDY
from docs.site.study_schema import study_schema
from hardware.io.config_file import read_mapping
from tuner.study_file.schema_file import SCHEMA

STUDIES = sorted((Path(__file__).parents[3] / "configs" / "studies").rglob("*.yaml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_what_the_code_says(page):
    """The committed page is what `python -m docs.site` writes."""
    assert page.read_text(encoding="utf-8") == written(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_generated_is_missing(page):
    """Every part that can be written has its place on the page, once; groups have the keys of equal hosts."""
    assert sorted(names_of(page.read_text(encoding="utf-8"))) == sorted(set(PAGES[page]()) - {"_GroupForm"})


def test_every_key_says_what_it_means():
    """No key of a study file is without a sentence, nor a mapping without a line."""
    schema = study_schema()
    models = {STUDY: schema} | schema["$defs"]
    keys = {(name, key): entry for name, model in models.items() for key, entry in model["properties"].items()}

    assert [key for key, entry in keys.items() if not entry.get("description")] == []
    assert [name for name, model in models.items() if not model.get("description")] == []


def test_the_schema_is_committed():
    """The schema that the package brings along is what `python -m docs.site` writes."""
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_ready_studies_follow_the_schema(path):
    """An editor with the schema finds no mistake in the studies that Meshtune comes with."""
    jsonschema.Draft202012Validator(json.loads(schema_text())).validate(read_mapping(path))


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "llama3-8b"},
        {"search": {"max_trails": 3}},
        {"cluster": {"name": "dgx-h100", "host": 8}},
        {"current": {"pipeline": 2}},
        {"trial": {"backend": "torch", "steps": 3}},
    ],
    ids=["top", "search", "cluster", "current", "trial"],
)
def test_the_schema_refuses_unknown_keys(change):
    """A misspelt key is a mistake in the editor too, at any depth."""
    study = {"name": "a", "model": "llama3-8b", "cluster": {"name": "dgx-h100"}, "search": {"seed": 1}}
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    validator.validate(study)

    with pytest.raises(jsonschema.ValidationError):
        validator.validate(study | change)
