"""Hugging Face's transformers: models of `from_pretrained` are built from their configuration, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.rehearsal.torch_room.progress import Progress


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in transformers' modules, by their names."""
    return {
        "transformers.modeling_utils": lambda module: _load_nothing(module, progress),
        "transformers.utils.hub": _name_what_is_missing,
    }


def _name_what_is_missing(module: Any) -> None:
    """Let errors about files that are not on this machine say whose they are."""
    find = module.cached_files

    def cached_files(path_or_repo_id: Any, *given: Any, **named: Any) -> Any:
        try:
            return find(path_or_repo_id, *given, **named)
        except OSError as error:
            raise OSError(f"files of {path_or_repo_id} are not on this machine: {error}") from error

    module.cached_files = cached_files


def _load_nothing(module: Any, progress: Progress) -> None:
    """Let all weights be missing, so that transformers itself makes and places them."""
    model_class, information = module.PreTrainedModel, module.LoadStateDictInfo
    dtype_of = module._get_dtype

    def _load_pretrained_model(model: Any, *_: Any, **__: Any) -> Any:
        progress.watch.invented["transformers: weights of a checkpoint"] += 1
        found = information(
            missing_keys=set(model.state_dict()),
            unexpected_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        return found, None

    def _get_dtype(dtype: Any, files: Any, config: Any, *given: Any, **named: Any) -> Any:
        if dtype == "auto" and getattr(config, "dtype", None) is None:
            dtype = torch.float32
        return dtype_of(dtype, files, config, *given, **named)

    model_class._load_pretrained_model = staticmethod(_load_pretrained_model)
    module._get_dtype = _get_dtype
    module._get_resolved_checkpoint_files = lambda *_, **__: ([], None)
    module.log_state_dict_report = lambda *_, **__: None
