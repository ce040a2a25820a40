"""Keys of a study file's `job:` and `space:` that are dimensions, made of the table in tuner/space/dimensions.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodels.job.parallel_config import DIMENSIONS
from tuner.space.dimensions import SEARCHED


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Key of a mapping in study files.

    Attributes:
        name: Name of the key in the file.
        type: Annotation by which pydantic checks its value.
        default: Value where the file leaves the key out.
        meaning: Text of the reference, which may end with a paragraph `Default: ...`.
    """

    name: str
    type: Any
    default: Any
    meaning: str


def declare_keys(namespace: dict[str, Any], keys: Iterable[Key]) -> None:
    """Declare keys in the body of a pydantic class, as if they were written there, in the order of the reference.

    The namespace is that of the class body, from `vars()`; an annotated key must stand above the call.
    """
    for key in keys:
        namespace["__annotations__"][key.name] = key.type
        namespace[key.name] = Field(default=key.default, description=key.meaning)


def _type_of(name: str) -> Any:
    if name not in DIMENSIONS:
        return Annotated[int, Field(ge=1)]
    dimension = DIMENSIONS[name]
    if dimension.is_switch:
        return bool
    if dimension.choices and not dimension.is_number:
        return Literal[dimension.choices]
    return Annotated[int, Field(ge=0, le=max(dimension.choices))] if dimension.choices else Annotated[int, Field(ge=0)]


def _job_keys(*, choices: bool) -> Iterable[Key]:
    for name, dimension in SEARCHED.items():
        if dimension.job_key is not None and bool(DIMENSIONS[name].choices) == choices:
            default = dimension.job_default
            one = _type_of(name)
            yield Key(
                name=name, type=one | None if default is None else one, default=default, meaning=dimension.job_key
            )


JOB_CHOICES = tuple(_job_keys(choices=True))
"""Keys of `job:` whose values are choices."""
JOB_NUMBERS = tuple(_job_keys(choices=False))
"""Keys of `job:` whose values are any numbers."""
SPACE_LISTS = tuple(
    Key(name=name, type=list[_type_of(name)] | None, default=None, meaning=dimension.space_key)  # type: ignore[misc] # a type made at run time
    for name, dimension in SEARCHED.items()
)
"""Keys of `space:`, each a list of values."""
