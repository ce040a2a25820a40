from hardware.io.config_file import DocumentedModel
from hardware.io.documented_keys import attribute_docstrings


class Inner(DocumentedModel):
    """A mapping within another."""

    size: int = 1
    """Size of it."""


class Base(DocumentedModel):
    """A mapping that another one extends."""

    name: str
    """Name, in
    two lines."""
    plain: int = 2


class Keys(Base):
    """A mapping with one of each."""

    inner: Inner | None = None
    """Mapping within.

    Default: none
    """


def test_a_schema_has_the_texts_under_the_keys():
    """The texts of a class, of the one that it extends and of the one within it are descriptions; others have none."""
    schema = Keys.model_json_schema()

    told = {name: entry.get("description") for name, entry in schema["properties"].items()}
    assert told == {"name": "Name, in\ntwo lines.", "plain": None, "inner": "Mapping within.\n\nDefault: none"}
    assert schema["$defs"]["Inner"]["properties"]["size"]["description"] == "Size of it."
    assert attribute_docstrings(Inner) == {"size": "Size of it."}
