"""Kinds of blocks by name: every class in this folder that names its kind."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

import costmodels.blocks
from costmodels.blocks.contract import AbstractBlock


@cache
def block_kinds() -> Mapping[str, Callable[..., AbstractBlock]]:
    """Return the class of every kind of block by its name, sorted."""
    names = [module.name for module in pkgutil.iter_modules(costmodels.blocks.__path__, "costmodels.blocks.")]
    members = [member for name in names for member in vars(import_module(name)).values()]
    kinds = [
        one for one in members if isinstance(one, type) and issubclass(one, AbstractBlock) and hasattr(one, "kind")
    ]
    return {kind.kind: kind for kind in sorted(kinds, key=lambda kind: kind.kind)}
