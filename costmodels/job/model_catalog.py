"""Find a model by catalog name, or read one from a YAML file of ours or a Hugging Face config.json."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import create_model

from costmodels.job.decoder import Decoder
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.listed_model import listed_model, lists_blocks
from costmodels.job.model_spec import ModelSpec, plain_model
from costmodels.job.tower import TowerWork
from costmodels.job.traced_model import model_of_trace
from hardware.io.catalogs import BrokenFile, added_files, read_entries
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean

_CATALOG_DIR = Path(__file__).parents[1] / "catalog" / "models"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


def model_names() -> tuple[str, ...]:
    """Return the names of the catalog's models, sorted."""
    shipped = shipped_models()
    return tuple(sorted({*shipped, *added_files("models", shipped)}))


def shipped_models() -> dict[str, Path]:
    """Return the file of every model that Meshtune ships by name, sorted."""
    return {path.stem: path for path in sorted(_CATALOG_DIR.glob("*.yaml"))}


def read_models() -> tuple[dict[str, ModelSpec], tuple[BrokenFile, ...]]:
    """Return all models of the catalog by name, sorted, and the files that cannot work."""
    shipped = shipped_models()
    added = added_files("models", shipped)
    found, broken = read_entries(added, lambda file: find_model(file.name))
    return dict(sorted((found | {name: find_model(name) for name in shipped if name not in added}).items())), broken


@functools.cache
def find_model(name: str) -> ModelSpec:
    """Return the catalog's model of that name.

    Raises:
        ConfigError: the catalog has no such model.
    """
    shipped = shipped_models()
    added = added_files("models", shipped)
    if name in added:
        return read_model_file(added[name].checked_path())
    if name not in shipped:
        nearest = did_you_mean(name, model_names())
        raise ConfigError("no such model in the catalog", key="model", value=name, nearest=nearest)
    return read_model_file(shipped[name])


def load_model(reference: str, base_dir: Path, towers: Mapping[str, TowerWork] | None = None) -> ModelSpec:
    """Find or read the model that a study names.

    Args:
        reference: Name in the catalog, or a path, relative to `base_dir`, to YAML with the fields of Decoder as keys,
            to a config.json, or to the directory that holds one. A catalog name wins over a file of the same name.
        base_dir: Directory of the file that names the model.
        towers: Work of the towers of a multimodal model, by their names.

    Raises:
        ConfigError: there is no such model or file, the file cannot work, or the model has no such towers.
    """
    if reference in model_names():
        _check_towers(towers, reference)
        return find_model(reference)
    path = _path_of(reference, base_dir)
    if path is not None and path == base_dir / reference and not path.exists():
        siblings = [one.name for one in path.parent.glob(f"*{path.suffix}")]
        nearest = did_you_mean(path.name, siblings) if siblings else "check the path"
        raise ConfigError("no such file", key="model", value=reference, nearest=nearest)
    if path is not None:
        return read_model_file(path, towers)
    rule = "is neither a model of the catalog nor a YAML or config.json file"
    raise ConfigError(rule, key="model", value=reference, nearest=did_you_mean(reference, model_names()))


def trace_model_file(reference: str, base_dir: Path) -> ModelSpec:
    """Trace the model that transformers builds of a config.json.

    Args:
        reference: Path, relative to `base_dir`, to the file or to its directory.
        base_dir: Directory of the file that names the model.

    Raises:
        ConfigError: there is no such file, transformers or torch is not installed, or transformers cannot build it.
    """
    path = _path_of(reference, base_dir)
    if path is None or not path.is_file():
        raise ConfigError("no such file", key="transformers", value=reference, nearest="check the path")
    mapping = read_mapping(path)
    try:
        from costmodels.traced.with_torch.tracing import trace_transformers  # noqa: PLC0415 # few studies need torch
    except ModuleNotFoundError as error:
        rule = f"needs {error.name}, which is not installed"
        raise ConfigError(rule, key="transformers", value=reference, nearest="pip install torch transformers") from None
    try:
        traced = trace_transformers(mapping)
        return model_of_trace(traced, name=_name_of(path))
    except ConfigError as error:
        raise error.in_file(str(path)) from None


def _path_of(reference: str, base_dir: Path) -> Path | None:
    """Return the file that `reference` means, or None if it does not look like a file and none exists.

    A missing file in a directory that exists is returned, so that the error about it can list the directory.
    """
    if not reference or not reference.isprintable():
        return None
    path = base_dir / reference
    try:
        if path.is_dir():
            return path / "config.json"
        return path if path.exists() or (path.suffix.lower() in _FILE_ENDINGS and path.parent.is_dir()) else None
    except OSError:  # longer than the system allows, or in a directory that may not be read
        return None


def _check_towers(towers: Mapping[str, TowerWork] | None, model: str) -> None:
    if towers:
        rule = f"needs a config.json of a multimodal model, and the model is {model}"
        raise ConfigError(rule, key="job.towers", nearest="leave it out")


def read_model_file(path: Path, towers: Mapping[str, TowerWork] | None = None) -> ModelSpec:
    """Read the model in one file: a `.json` as a Hugging Face configuration, anything else as YAML of ours.

    The model takes its name from the file, or from the directory if the file is called config.json.
    """
    mapping = read_mapping(path)
    if path.suffix.lower() == ".json":
        return model_from_hugging_face(mapping, name=_name_of(path), file=str(path), towers=towers)
    _check_towers(towers, path.stem)
    return _model_from_yaml(mapping, name=path.stem, file=str(path))


def _name_of(path: Path) -> str:
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return name or path.stem


def _model_from_yaml(mapping: Mapping[str, Any], *, name: str, file: str) -> ModelSpec:
    if lists_blocks(mapping):
        return listed_model(mapping, name=name, file=file)
    read = validate_mapping(_ModelFile, {"name": name, **mapping}, file=file)
    values = {key: getattr(read, key) for key in _ModelFile.model_fields}
    try:
        return plain_model(**{**values, "assumed": tuple(values["assumed"])})
    except ConfigError as error:
        raise error.in_file(file) from None


def _model_file_keys() -> dict[str, Any]:
    types = {**get_type_hints(Decoder), "assumed": list[str]}
    return {
        field.name: (types[field.name], ... if field.default is MISSING else field.default) for field in fields(Decoder)
    }


_ModelFile = create_model("_ModelFile", __base__=StrictModel, **_model_file_keys())
