"""Files of a study that each trial gets a copy of, with the values of knobs under their keys.

The driver reads the files once, and each host writes the copies of a trial into a folder of its own, which ends with
the trial. A JSON or YAML file is parsed and written again, which loses its comments. A TOML file is changed line by
line, because nothing in the standard library writes TOML.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from costmodels.job.parallel_config import KnobValue
from hardware.io.config_file import MAX_YAML_BYTES, parse_json, read_text
from hardware.io.errors import ConfigError
from trials.knobs.places import set_key, text_of

SUFFIXES = (".json", ".yaml", ".yml", ".toml")
"""Endings of the names of files whose keys can be set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFile:
    """File of a study that each trial gets a copy of.

    Attributes:
        name: Name of the file in the study, which is the placeholder of the path of the copy.
        file_name: Name of the file in its folder.
        text: Text of the file.
    """

    name: str
    file_name: str
    text: str

    def with_values(self, values: Mapping[str, KnobValue]) -> str:
        """Return the text with values under their keys, such as `zero_optimization.reduce_bucket_size`; null removes.

        Raises:
            ConfigError: The file has no mapping where a key asks for one, or a TOML file does not have the key.
        """
        if not values:
            return self.text
        if self.file_name.endswith(".toml"):
            text = self.text
            for key, value in values.items():
                text = _set_in_toml(text, key, value)
            return text
        parsed = self.parsed()
        for key, value in values.items():
            set_key(parsed, key, value)
        if self.file_name.endswith(".json"):
            return json.dumps(parsed, indent=2) + "\n"
        return str(yaml.safe_dump(parsed, sort_keys=False))

    def parsed(self) -> dict[str, Any]:
        """Return the file's mapping.

        Raises:
            ConfigError: It cannot be parsed, or is no mapping.
        """
        try:
            if self.file_name.endswith(".toml"):
                found = tomllib.loads(self.text)
            elif self.file_name.endswith(".json"):
                found = parse_json(self.text)
            else:
                found = yaml.safe_load(self.text)  # as the framework reads it, with YAML 1.1's words for true and false
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"cannot be parsed: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(found, dict):
            raise ConfigError("is no mapping of keys to values")
        return found


def read_trial_file(name: str, path: Path) -> TrialFile:
    """Read a file of a study.

    Raises:
        ConfigError: It cannot be read or parsed, or its name ends otherwise than those of SUFFIXES.
    """
    if not path.name.endswith(SUFFIXES):
        raise ConfigError("is no JSON, YAML or TOML file by its name", value=str(path), nearest=", ".join(SUFFIXES))
    found = TrialFile(name=name, file_name=path.name, text=read_text(path, most_bytes=MAX_YAML_BYTES))
    found.parsed()
    return found


@contextlib.contextmanager
def write_files(files: Sequence[tuple[str, str, str]], values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Write the copies of a trial into a new folder, and yield their paths by their placeholders.

    Args:
        files: Placeholder, file name and text of each copy.
        values: Values of other placeholders, of which only `trial` names the folder.
    """
    if not files:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix=f"trial-{values['trial']}-") as folder:
        paths = {}
        for name, file_name, text in files:
            place = Path(folder) / name / file_name
            place.parent.mkdir()
            place.write_text(text, encoding="utf-8")
            paths[name] = str(place)
        yield paths


def _set_in_toml(text: str, key: str, value: KnobValue) -> str:
    """Return the text of a TOML file with the value of one key replaced, which stands on one line of its table."""
    *table, last = key.split(".")
    header = f"[{'.'.join(table)}]"
    current, found = "", []
    wanted = re.compile(rf"(\s*){re.escape(last)}(\s*=\s*)")
    is_set = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.split("#")[0].strip()
        match = wanted.match(line)
        if match and current == (header if table else "") and not is_set:
            is_set = True
            if value is not None:
                found.append(f"{match[1]}{last}{match[2]}{_in_toml(value)}")
            continue
        found.append(line)
    if not is_set and value is not None:
        if table and header not in (line.split("#")[0].strip() for line in found):
            raise ConfigError("is no table of the file", key=key, value=header)
        at = next((n + 1 for n, line in enumerate(found) if line.split("#")[0].strip() == header), 0) if table else 0
        found.insert(at, f"{last} = {_in_toml(value)}")
    changed = "\n".join(found) + "\n"
    try:
        tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        raise ConfigError("has a value of several lines in the file, which cannot be replaced", key=key) from None
    return changed


def _in_toml(value: KnobValue) -> str:
    return json.dumps(value) if isinstance(value, str) else text_of(value)
