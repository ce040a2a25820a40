"""Read YAML and JSON files strictly, and turn their mappings into checked, frozen objects.

PyYAML by itself reads `1e-6` as text, `no` as False, `012` as ten, `12:30` as 750, keeps the last of two equal keys
without a warning, and lets a few lines of aliases grow to gigabytes. `read_mapping` closes these holes: scalars follow
YAML 1.2's core schema, equal keys are an error, and aliases and anything deeper or larger than a configuration file
could be are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware.io.documented_keys import attribute_docstrings
from hardware.io.errors import ConfigError, did_you_mean, quote_value
from hardware.io.input_file import read_input

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

MAX_FILE_BYTES = 4_000_000
MAX_YAML_BYTES = 1_000_000
MAX_VALUES = 25_000
"""Most values of one YAML file, which is then read in a second or two; the largest catalog has a fifth of that."""
MAX_DEPTH = 32

ModelT = TypeVar("ModelT", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of every checked mapping: exact types, unknown keys are errors, frozen after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class DocumentedModel(StrictModel):
    """Base of mappings that users write: the docstring under a key is its text in the reference and in editors.

    A last paragraph `Default: ...` describes the default where the key's default value does not.

    Attributes:
        RENAMED: What stands in place of each key that earlier versions had, in words.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the model, with the docstrings of its attributes as descriptions."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in attribute_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


class SourcedNumber(StrictModel):
    """Number of a catalog, with its source (a key of the catalog's `sources`) and its confidence."""

    value: float = Field(gt=0, allow_inf_nan=False)
    source: str
    confidence: Literal["high", "medium", "low", "assumed"]


class SourcedCount(SourcedNumber):
    """Number of things of a catalog."""

    value: int = Field(ge=1, le=1_000_000)


class SourcedSize(SourcedNumber):
    """Peak, size or power of a catalog, in the unit of its key, within what any device could have."""

    value: float = Field(ge=1e-6, le=1e6)


class SourcedShare(SourcedNumber):
    """Share of another number of a catalog."""

    value: float = Field(ge=1e-6, le=1.5)


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars, unique keys, no aliases and bounded depth."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc] # the stubs put it on the instance

    depth = 0
    num_values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call] # the stubs leave it open
            raise ConfigError("aliases (*name) are not allowed", key=f"line {mark.line + 1}")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels")
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ConfigError(f"holds more than {MAX_VALUES:,} values")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if _HALF.search(text):  # an escape such as "\ud800", which no file can hold
            raise ConfigError(_IS_HALF, key=f"line {node.start_mark.line + 1}", value=text)
        return text

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError("a key must be text", key=f"line {key_node.start_mark.line + 1}", value=key)
            if key in seen:
                raise ConfigError(
                    f"appears twice in one mapping (second time on line {key_node.start_mark.line + 1}); keep one",
                    key=key,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_READ_DIFFERENTLY = re.compile("[\t\ufeff]|[|>][-+0-9]*#")
"""Characters with which libyaml accepts files that PyYAML's own parser refuses, or reads them otherwise."""

_INDICATORS = re.compile("[?!]")
"""Characters that both read alike inside of a scalar, but for a plain one of a flow collection or at its begin."""


class _UnusualError(Exception):
    """Text that `_QuickReader` leaves to the slower parser."""


class _QuickReader:
    """Reader of the events of libyaml's parser, which takes a fifth of the slower parser's time.

    It makes the same values as `_CoreLoader` or none: whatever is a mistake or unusual is for the slower parser.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._next: Callable[[], Any] = yaml.cyaml.CParser(text).get_event  # type: ignore[attr-defined] # not in the stubs
        self._num_indicators = len(_INDICATORS.findall(text))
        self._num_values = 0

    def read(self) -> Any:
        """Return the value of the only document.

        Raises:
            _UnusualError: The text is none for this reader.
        """
        begin = [type(self._next()) for _ in range(2)]
        if begin != [yaml.events.StreamStartEvent, yaml.events.DocumentStartEvent]:
            raise _UnusualError
        value = self._value(self._next(), 1, in_flow=False)
        end = [type(self._next()) for _ in range(2)]
        if end != [yaml.events.DocumentEndEvent, yaml.events.StreamEndEvent] or self._num_indicators:
            raise _UnusualError
        return value

    def _value(self, event: Any, depth: int, *, in_flow: bool) -> Any:
        self._num_values += 1
        kind = type(event)
        if (
            kind is yaml.events.AliasEvent
            or event.anchor is not None
            or event.tag is not None
            or depth > MAX_DEPTH
            or self._num_values > MAX_VALUES
        ):
            raise _UnusualError
        if kind is yaml.events.ScalarEvent:
            return self._scalar(event, in_flow=in_flow)
        in_flow = in_flow or event.flow_style
        if kind is yaml.events.SequenceStartEvent:
            found = []
            while type(event := self._next()) is not yaml.events.SequenceEndEvent:
                found.append(self._value(event, depth + 1, in_flow=in_flow))
            return found
        mapping: dict[str, Any] = {}
        while type(event := self._next()) is not yaml.events.MappingEndEvent:
            key = self._value(event, depth + 1, in_flow=in_flow)
            if not isinstance(key, str) or key in mapping:
                raise _UnusualError
            mapping[key] = self._value(self._next(), depth + 1, in_flow=in_flow)
        return mapping

    def _scalar(self, event: Any, *, in_flow: bool) -> Any:
        if self._num_indicators:
            raw = self._text[event.start_mark.index : event.end_mark.index]
            if event.style or not (in_flow or _INDICATORS.match(raw)):
                self._num_indicators -= len(_INDICATORS.findall(raw))
        text: str = event.value
        if event.style or text[:1] not in _BEGIN_OF_OTHERS:
            return text
        for _, pattern, parse in _SCALARS:
            if pattern.match(text):
                return parse(text)
        return text


_HALF = re.compile("[\ud800-\udfff]")
_IS_HALF = "holds half of a surrogate pair, or a byte that is no UTF-8: no character that could be written"
_HALF_IN_JSON = re.compile(r"\\u[dD][89a-fA-F]")


def _constructor(parse: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    """Return the constructor of a loader that parses the text of a node, and tells the line of a number's mistake."""

    def construct(loader: Any, node: Any) -> Any:
        text = str(loader.construct_scalar(node))
        try:
            return parse(text)
        except ConfigError as error:
            raise error.under(f"line {node.start_mark.line + 1}") from None

    return construct


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{quote_value(text)} is neither true nor false")
    return text.lower() == "true"


LEAST_SIZE, MOST_SIZE = 1e-100, 1e100
"""Smallest and largest size of a number other than 0, so that products and ratios of several are numbers, too."""


def check_size(number: float, *, key: str | None = None) -> None:
    """Check that a number is 0 or of a size with which one can reckon; infinities and NaN are for others to refuse.

    Raises:
        ConfigError: It is closer to 0, or farther from it.
    """
    if number and math.isfinite(number) and not LEAST_SIZE <= abs(number) <= MOST_SIZE:
        rule = "is too far from 0" if abs(number) > 1 else "is too close to 0"
        raise ConfigError(f"{number!r} {rule}; sizes are from {LEAST_SIZE:g} to {MOST_SIZE:g}", key=key)


def _parse_float(text: str) -> float:
    number = float(text)
    check_size(number)
    return number


_SCALARS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = (
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), _parse_bool),
    ("null", re.compile(r"(~|null|Null|NULL|)$"), lambda _: None),
    ("int", re.compile(r"[-+]?[0-9]+$"), int),
    (
        "float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
        lambda text: _parse_float(re.sub(r"\.(inf|nan)$", r"\1", text.lower())),
    ),
)
"""Plain scalars that are no text: the name of their tag, their pattern, and what makes their value."""

_BEGIN_OF_OTHERS = "tTfFnN~+-.0123456789"
"""First characters of the plain scalars that are no text, of which null may also have none."""

_CoreLoader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag in {None, *(f"tag:yaml.org,2002:{name}" for name in ("null", "str", "seq", "map"))}
}
for _name, _pattern, _parse in _SCALARS:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)
    if _name != "null":
        _CoreLoader.add_constructor(f"tag:yaml.org,2002:{_name}", _constructor(_parse))


def number_in(text: str) -> float | None:
    """Return the number of a cell of a table; None if it is no number."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def read_text(path: Path, *, most_bytes: int = MAX_FILE_BYTES) -> str:
    """Read the text of a configuration file.

    Raises:
        ConfigError: the file can't be read; it says why.
    """
    try:
        text = read_input(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", file=str(path)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file, or of a JSON file with the ending .json.

    Raises:
        ConfigError: the file is missing, too large, not a mapping, malformed, or repeats a key.
    """
    is_json = path.suffix.lower() == ".json"
    text = read_text(path, most_bytes=MAX_FILE_BYTES if is_json else MAX_YAML_BYTES)
    try:
        loaded = parse_json(text) if is_json else parse_yaml(text)
    except ConfigError as error:
        raise error.in_file(str(path)) from None
    if not isinstance(loaded, dict):
        seen = "is empty" if loaded is None else f"holds {_KINDS.get(type(loaded), 'a number')}"
        raise ConfigError(f"must hold a mapping (`key: value` lines) at its top level, but {seen}", file=str(path))
    return loaded


_KINDS = {str: "text", list: "a list", bool: "true or false"}
"""Words for a value in place of a mapping; the value is not shown, since an unrelated file may hold secrets."""


def parse_yaml(text: str) -> Any:
    """Parse strict YAML text (also used for `--set key=value`)."""
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"is larger than {MAX_YAML_BYTES // 1_000_000} MB")
    if yaml.__with_libyaml__ and not _READ_DIFFERENTLY.search(text):
        try:
            return _QuickReader(text).read()
        except (_UnusualError, ConfigError, yaml.YAMLError, ValueError):
            pass  # the slower parser tells the mistake better
    loader = None
    try:
        loader = _CoreLoader(text)  # refuses control characters
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else None
        if isinstance(error, yaml.reader.ReaderError):
            where = f"line {text.count(chr(10), 0, error.position) + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"is not valid YAML ({problem})", key=where) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid YAML ({error})") from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_json(text: str) -> Any:
    """Parse JSON text; a key that appears twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [name for name, _ in pairs]
            raise ConfigError(
                "appears twice in one mapping; keep one", key=next(n for n in names if names.count(n) > 1)
            )
        return mapping

    try:
        loaded = json.loads(text, object_pairs_hook=unique, parse_float=_parse_float)
        if _HALF_IN_JSON.search(text):
            json.dumps(loaded, ensure_ascii=False).encode()
        return loaded
    except UnicodeEncodeError as error:
        raise ConfigError(_IS_HALF, value=error.object[error.start : error.start + 1]) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"is not valid JSON ({error.msg})", key=f"line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid JSON ({error})") from None


def validate_mapping(model: type[ModelT], mapping: Mapping[str, Any], *, file: str | None = None) -> ModelT:
    """Validate `mapping` as an object of `model`.

    Raises:
        ConfigError: the mapping has mistakes; it tells the first one.
    """
    try:
        return model.model_validate(dict(mapping))
    except ValidationError as error:
        raise _as_config_error(model, mapping, error, file) from None


_WANTED_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""Types in the words of a configuration file, by pydantic's kind of error."""


def _as_config_error(
    model: type[BaseModel], mapping: Mapping[str, Any], error: ValidationError, file: str | None
) -> ConfigError:
    # An unknown key is the likeliest cause of a "missing" one, so it is told first.
    entries = error.errors()
    first = min(entries, key=lambda entry: entry["type"] != "extra_forbidden")
    location = [str(part) for part in first["loc"]]
    key = _key_at(mapping, first["loc"], is_missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        nearest = did_you_mean(location[-1], owner.model_fields) if owner else None
        if owner and issubclass(owner, DocumentedModel) and location[-1] in owner.RENAMED:
            rule = "is the name that earlier versions had for another key"
            return ConfigError(rule, key=key, value=first["input"], nearest=owner.RENAMED[location[-1]], file=file)
        # text may be a secret that its owner has put in the wrong place
        value = first["input"] if isinstance(first["input"], (int, float)) else None
        return ConfigError("unknown key", key=key, value=value, nearest=nearest, file=file)
    if first["type"] == "missing":
        return ConfigError("is required and missing", key=key, file=file)
    if first["type"].startswith("union_tag"):
        return _unknown_tag(first, key, file)
    if first["type"] in _WANTED_TYPES:
        # a value that may have several types has one entry for each
        here = [entry["type"] for entry in entries if _key_at(mapping, entry["loc"]) == key]
        wanted = dict.fromkeys(_WANTED_TYPES[kind] for kind in here if kind in _WANTED_TYPES)
        rule = f"must be {' or '.join(wanted)}{', but is empty (null)' if first['input'] is None else ''}"
        owner = _model_at(model, location)
        is_bare = owner is not None and issubclass(owner, SourcedNumber) and type(first["input"]) in (int, float)
        nearest = f"for example {{value: {first['input']}, source: NAME, confidence: assumed}}" if is_bare else None
        return ConfigError(rule, key=key, value=first["input"], nearest=nearest, file=file)
    rule = re.sub(r"^(Input|List) should", "must", first["msg"].removeprefix("Value error, "))
    return ConfigError(rule, key=key, value=first["input"], file=file)


def _unknown_tag(entry: Any, key: str, file: str | None) -> ConfigError:
    """Describe the mistake in the key that selects one of several grammars."""
    tag = str(entry["ctx"]["discriminator"]).strip("'")
    if entry["type"] == "union_tag_not_found":
        return ConfigError("is required and missing", key=f"{key}.{tag}", file=file)
    choices = re.findall(r"'([^']*)'", entry["ctx"]["expected_tags"])
    value = entry["input"][tag]
    return ConfigError("is not known", key=f"{key}.{tag}", value=value, nearest=did_you_mean(value, choices), file=file)


def _key_at(mapping: Mapping[str, Any], location: tuple[int | str, ...], *, is_missing: bool = False) -> str:
    """Return the dotted key at pydantic's `location`, without the members of unions that pydantic names there."""
    parts: list[str] = []
    value: Any = mapping
    tag: Any = None  # of the union whose mapping was just entered
    for position, part in enumerate(location):
        is_tag, tag = part == tag, None
        if is_tag:
            continue
        in_mapping = isinstance(value, Mapping) and part in value
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_mapping or in_list:
            value = value[part]
            tag = value.get("backend") if isinstance(value, Mapping) else None
        elif not (is_missing and position == len(location) - 1):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _model_at(model: type[BaseModel], location: list[str]) -> type[BaseModel] | None:
    """Return the model class that checks the mapping at `location`, as far as the annotations tell."""
    current: type[BaseModel] = model
    parts = iter(location)
    for part in parts:
        field = current.model_fields.get(part)
        if field is None:
            continue  # an index of a list
        inner = _models_in(field.annotation)
        if len(inner) > 1:
            tag = next(parts, "")
            inner = [m for m in inner if tag in str(m.model_fields.get("backend"))] or inner
        if not inner:
            return None
        current = inner[0]
    return current


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
