"""The grammar of study files as a JSON schema, for editors, and for the reference that is made of it."""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import models_json_schema

from costmodels.job.parallel_config import DEGREES, ENUMERATED_DIMENSIONS
from hardware.cluster import CLUSTER_FORMS
from tuner.study_file.study_keys import StudyKeys

_REFERENCE = "#/$defs/{model}"
_DEGREE = {"type": "integer", "minimum": 1}


def study_schema() -> dict[str, Any]:
    """The schema of a study file (draft 2020-12): every key with its type, its default and its meaning in Markdown."""
    models = (StudyKeys, *CLUSTER_FORMS)
    places, found = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    definitions = found["$defs"]
    study = definitions.pop(places[StudyKeys, "validation"]["$ref"].rpartition("/")[2])
    cluster = {"anyOf": [places[form, "validation"] for form in CLUSTER_FORMS]}
    keys = study["properties"]
    keys["cluster"] = cluster | {"description": keys["cluster"]["description"]}
    keys["current"] |= {"properties": _current_keys(definitions), "additionalProperties": False}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **study, "$defs": definitions}


def _current_keys(definitions: dict[str, Any]) -> dict[str, Any]:
    """The degrees, and what else a study may open, each as one of the values that `space:` lists."""
    lists = definitions["SpaceKeys"]["properties"]
    further = {name: lists[name]["anyOf"][0]["items"] for name in ENUMERATED_DIMENSIONS}
    return dict.fromkeys(DEGREES, _DEGREE) | further | {"assignment": {"type": "string"}}


def plain_schema() -> dict[str, Any]:
    """`study_schema()` as an editor shows it: without links, which lead nowhere there."""
    return _without_links(study_schema())  # type: ignore[no-any-return] # a mapping stays one


def _without_links(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_links(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_links(inner) for inner in value]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", value) if isinstance(value, str) else value
