"""Tables of keys in docs/placement.md, generated from the models that validate placement files."""

from __future__ import annotations

from docs.site.study_file import table_of
from tuner.place.file_keys import PlacementKeys
from tuner.place.operators.file_keys import OperatorPlacementKeys


def placement_tables() -> dict[str, str]:
    """Return the table of each kind of mapping in a placement file, by the name of its model."""
    models = {}
    for keys in (PlacementKeys, OperatorPlacementKeys):
        schema = keys.model_json_schema()
        models |= {keys.__name__: schema} | schema["$defs"]
    return {name: table_of(model) for name, model in models.items()}
