"""Vocabulary sizes for scripts that name a tokenizer and no size.

The tokenizer's own files say it, if they are on this machine, or else its published name. Its class does not: a
Llama2Tokenizer reads any SentencePiece model. Of two classes the framework's code fixes the size where the script says
nothing else: GPT2BPETokenizer without --vocab-file downloads GPT-2's vocabulary, and TikTokenizer without --vocab-size
has 2^17 entries (Megatron-LM megatron/core/tokenizers/utils/build_tokenizer.py, text/libraries/megatron_hf_tokenizer.py
and tiktoken_tokenizer.py).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from hardware.io.config_file import read_mapping
from tuner.imports.flags import Flags
from tuner.imports.tokenizer_files import rows_of_files

_NAMING = ("--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-path", "--vocab-file")
"""Flags whose value names a tokenizer."""
_OF_MODELS = {
    *("Llama2Tokenizer", "Llama3Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "TikTokenizer"),
    *("HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer", "MultimodalTokenizer"),
}
"""Values of --tokenizer-type whose tokenizers do not read --vocab-file (Megatron-LM, training/tokenizer)."""
_FIXED = {
    "GPT2BPETokenizer": ("GPT-2", 50_257, "--vocab-file"),
    "TikTokenizer": ("TikTokenizer's default", 131_072, ""),
}
"""Vocabularies that a value of --tokenizer-type fixes: name, rows, and the flag that would name another one."""
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
    """

    name: str
    pattern: str
    rows: int
    source: str


@functools.cache
def vocabularies() -> tuple[Vocabulary, ...]:
    """Return the catalog of vocabularies, in the order in which they are tried."""
    listed = read_mapping(Path(__file__).parent / "vocabularies.yaml")["vocabularies"]
    return tuple(Vocabulary(**one) for one in listed)


def propose(flags: Flags) -> tuple[Vocabulary, str] | None:
    """Return the vocabulary of the tokenizer that the flags name, and the flag that names it; None if none is known."""
    if flags.has(*_EXTENDING):
        return None
    reads_no_file = flags.text_if_known("--tokenizer-type") in _OF_MODELS
    for flag in _NAMING:
        if flag == "--vocab-file" and reads_no_file:
            continue
        for value in flags.values(flag)[:1]:
            if (stated := None if value.unknown else rows_of_files(value.text.strip("'\""))) is not None:
                rows, file = stated
                return Vocabulary(name=str(file), pattern="", rows=rows, source=str(file)), _place(flags, flag)
            # The name of a variable says nothing about what it holds.
            known = named_by(re.sub(r"\$\{?\w*\}?", "", value.text).strip("/'\""))
            if known is not None:
                return known, _place(flags, flag)
    kind = "" if flags.has(_PATCHED) else flags.text_if_known("--tokenizer-type")
    name, rows, other = _FIXED.get(kind, ("", 0, ""))
    if not rows or (other and flags.has(other)):
        return None
    return Vocabulary(name=name, pattern="", rows=rows, source="Megatron-LM"), _place(flags, "--tokenizer-type")


def why_unknown(flags: Flags) -> str:
    """Return why no vocabulary is proposed, with the flag that would state it."""
    named = next((flag for flag in ("--tokenizer-type", *_NAMING) if flags.has(flag)), None)
    if named is None:
        return "--vocab-size is not there"
    if (extending := next((flag for flag in _EXTENDING if flags.has(flag)), None)) is not None:
        return f"--vocab-size is not there, and {_place(flags, extending)} adds to the tokenizer's"
    return (
        f"--vocab-size is not there, and {_place(flags, named)} does not fix it: the tokenizer's files are not here, "
        "or do not say it"
    )


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
