"""Tables of keys in docs/placement.md and docs/research/operators.md, made from the models of placement files."""

from __future__ import annotations

from docs.site.study_file import table_of
from hardware.io.config_file import DocumentedModel
from tuner.place.file_keys import PlacementKeys
from tuner.place.operators.file_keys import OperatorPlacementKeys


def placement_tables() -> dict[str, str]:
    """Return the table of each kind of mapping in a placement file of modules, by the name of its model."""
    return _tables_of(PlacementKeys)


def operator_tables() -> dict[str, str]:
    """Return the table of each kind of mapping in a placement file of operators, by the name of its model."""
    return _tables_of(OperatorPlacementKeys)


def _tables_of(keys: type[DocumentedModel]) -> dict[str, str]:
    schema = keys.model_json_schema()
    models = {keys.__name__: schema} | schema["$defs"]
    return {name: table_of(model) for name, model in models.items()}
