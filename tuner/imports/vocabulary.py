"""Vocabulary sizes of known tokenizers, for scripts that name a tokenizer and no size."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from hardware.io.config_file import read_mapping
from tuner.imports.flags import Flags

_NAMING = ("--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-path", "--vocab-file")
"""Flags whose value names a tokenizer."""
_OF_MODELS = {
    *("Llama2Tokenizer", "Llama3Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "TikTokenizer"),
    *("HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer", "MultimodalTokenizer"),
}
"""Values of --tokenizer-type whose tokenizers do not read --vocab-file (Megatron-LM, training/tokenizer)."""
_EXTENDING = ("--extra-vocab-size", "--vocab-extra-ids")
"""Flags that add entries to a vocabulary."""
_PATCHED = "--patch-tokenizer-type"
"""Flag of Pai-Megatron-Patch, whose programs load another tokenizer than --tokenizer-type says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Vocabulary of a published model.

    Attributes:
        name: Name of the model.
        pattern: Regular expression for names and paths in lower case.
        rows: Rows of the model's embedding table.
        source: Where the number was published.
        types: Values of --tokenizer-type that stand for this vocabulary.
    """

    name: str
    pattern: str
    rows: int
    source: str
    types: tuple[str, ...] = ()


@functools.cache
def vocabularies() -> tuple[Vocabulary, ...]:
    """Return the catalog of vocabularies, in the order in which they are tried."""
    listed = read_mapping(Path(__file__).parent / "vocabularies.yaml")["vocabularies"]
    return tuple(Vocabulary(**one | {"types": tuple(one.get("types", ()))}) for one in listed)


def propose(flags: Flags) -> tuple[Vocabulary, str] | None:
    """Return the vocabulary of the tokenizer that the flags name, and the flag that names it; None if none is known."""
    if flags.has(*_EXTENDING):
        return None
    reads_no_file = flags.text("--tokenizer-type") in _OF_MODELS
    for flag in _NAMING:
        if flag == "--vocab-file" and reads_no_file:
            continue
        for value in flags.values(flag)[:1]:
            # The name of a variable says nothing about what it holds.
            known = named_by(re.sub(r"\$\{?\w*\}?", "", value.text).strip("/'\""))
            if known is not None:
                return known, _place(flags, flag)
    kind = None if flags.has(_PATCHED) else flags.text("--tokenizer-type")
    return next(((known, _place(flags, "--tokenizer-type")) for known in vocabularies() if kind in known.types), None)


def named_by(path: str) -> Vocabulary | None:
    """Return the vocabulary that the last two parts of a path name; None if none is known."""
    name = "/".join(path.lower().replace("_", "-").split("/")[-2:])
    patterns = ((one, one.pattern.replace("_", "-")) for one in vocabularies())
    return next((one for one, pattern in patterns if re.search(rf"(?<![a-z0-9])({pattern})", name)), None)


def _place(flags: Flags, flag: str) -> str:
    line = flags.line(flag)
    return f"{flag} (line {line})" if line else flag


def note(proposed: tuple[Vocabulary, str], rows: int) -> str:
    """Return the note that names a proposed vocabulary, its size and the flag that names it."""
    known, flag = proposed
    padded = "" if rows == known.rows else f", {rows:,} with padding"
    return f"vocab_size: {known.rows:,} rows{padded}, of {known.name}, which {flag} names; --vocab-size replaces it"
