"""Kinds of blocks by name: every class in this folder that names its kind, and those of installed packages."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module

import costmodels.blocks
from costmodels.blocks.contract import AbstractBlock
from hardware.io.plugins import load_plugin, plugins, refused


@cache
def block_kinds() -> Mapping[str, Callable[..., AbstractBlock]]:
    """Return the class of every kind of block by its name, sorted."""
    names = [module.name for module in pkgutil.iter_modules(costmodels.blocks.__path__, "costmodels.blocks.")]
    members = [member for name in names for member in vars(import_module(name)).values()]
    kinds = [
        one for one in members if isinstance(one, type) and issubclass(one, AbstractBlock) and hasattr(one, "kind")
    ]
    added = [_of_package(name) for name in plugins("blocks")]
    return {kind.kind: kind for kind in (*added, *sorted(kinds, key=lambda kind: kind.kind))}


def _of_package(name: str) -> type[AbstractBlock]:
    """Return the kind of block that a package declares.

    Raises:
        ConfigError: It is none, or has another name.
    """
    kind = load_plugin("blocks", name)
    if not (isinstance(kind, type) and issubclass(kind, AbstractBlock) and is_dataclass(kind)):
        raise refused("blocks", name, "is no subclass of costmodels.blocks.contract.AbstractBlock that is a dataclass")
    if getattr(kind, "kind", "") != name:
        raise refused("blocks", name, "has another `kind`")
    return kind
