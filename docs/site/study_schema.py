"""JSON schema of study files, for editors and for the generated tables of docs/study-file.md."""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import models_json_schema

from costmodels.job.parallel_config import DEGREES, ENUMERATED_DIMENSIONS
from hardware.cluster_file import CLUSTER_FORMS
from tuner.study_file.study_keys import StudyKeys

_REFERENCE = "#/$defs/{model}"
_DEGREE = {"type": "integer", "minimum": 1}


def study_schema() -> dict[str, Any]:
    """Return the JSON schema of a study file (draft 2020-12): type, default and meaning (Markdown) of every key."""
    models = (StudyKeys, *CLUSTER_FORMS)
    places, found = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    definitions = found["$defs"]
    study = definitions.pop(places[StudyKeys, "validation"]["$ref"].rpartition("/")[2])
    cluster = {"anyOf": [places[form, "validation"] for form in CLUSTER_FORMS]}
    keys = study["properties"]
    # The models leave these two keys open: the forms of a cluster and the degrees are checked by other code.
    keys["cluster"] = cluster | {"description": keys["cluster"]["description"]}
    keys["current"] |= {"properties": _current_keys(definitions), "additionalProperties": False}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **study, "$defs": definitions}


def _current_keys(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of the keys of `current:`: the degrees, the further dimensions and `assignment`.

    A key of `current:` takes a single value, so a further dimension has the schema of the list elements in `space:`.

    Args:
        definitions: JSON schemas of all models, by name of the model.
    """
    lists = definitions["SpaceKeys"]["properties"]
    further = {name: lists[name]["anyOf"][0]["items"] for name in ENUMERATED_DIMENSIONS}
    return dict.fromkeys(DEGREES, _DEGREE) | further | {"assignment": {"type": "string"}}


def plain_schema() -> dict[str, Any]:
    """Return the schema of a study file without Markdown links, because editors cannot follow relative links."""
    return _without_links(study_schema())  # type: ignore[no-any-return] # a mapping stays one


def _without_links(value: Any) -> Any:
    """Return a JSON value in which the texts of Markdown links replace the links, at any depth."""
    if isinstance(value, dict):
        return {key: _without_links(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_links(inner) for inner in value]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", value) if isinstance(value, str) else value
