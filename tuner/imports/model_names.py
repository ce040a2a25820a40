"""Models of the catalog under the names that recipes and repositories of weights have for them."""

from __future__ import annotations

import re

from costmodels.job.model_catalog import model_names

_AROUND = re.compile(
    r"(^meta[-_ ]?)|([-_](instruct|base|chat|hf|it|pretrain|sft|finetune|config|text|bf16|fp8\w*|nvfp4|low|precision"
    r"|v0[0-9.]+|[0-9]+k|[0-9]+gpu|[a-z]*[0-9]+00|mcore|megatron|tokenizer))+$"
)
_FAMILIES = (
    (r"^llama[-_]?3[._]?[13]?[-_](8b|70b|405b)$", r"llama3-\1"),
    (r"^llama[-_]?2[-_](13b|34b)$", r"llama2-\1"),
    (r"^llama[-_]?(7b|13b)$", r"llama-\1"),
    (r"^llama2[-_]7b$", "llama-7b"),
    (r"^qwen[-_]?2[._]?5[-_](7b|72b)$", r"qwen2.5-\1"),
    (r"^mixtral[-_]8x7b$", "mixtral-8x7b"),
    (r"^deepseek[-_]?v?3([-_.]?[01]?|[-_]671b)$", "deepseek-v3"),
)
"""Names after what stands around them is cut off, and the model of the catalog with the same sizes.

Llama 3.1 and 3.3 have the sizes of Llama 3 (arXiv 2407.21783, table 3), and Llama 2 7B those of Llama 7B with a context
of 4,096 (arXiv 2307.09288).
"""


def catalog_model(name: str) -> str:
    """Return the model of the catalog that a recipe's name or a path of weights stands for; empty if none does."""
    short = name.rstrip("/").rpartition("/")[2].lower()
    while (cut := _AROUND.sub("", short)) != short:
        short = cut
    for pattern, target in _FAMILIES:
        if re.fullmatch(pattern, short):
            return re.sub(pattern, target, short)
    return short if short in model_names() else ""
