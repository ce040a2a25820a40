import json
import re

import pytest

from tuner.imports import IMPORTERS
from tuner.imports.vocabulary import vocabularies

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --micro-batch-size 1"


def vocabulary_of(flags):
    """The rows that a script with these flags is read with, and the notes about them."""
    imported = IMPORTERS["megatron"](f"torchrun pretrain_gpt.py {SIZES} \\\n {flags}")
    notes = [note for note in imported.notes if note.startswith("vocab_size")]
    return imported.model.get("vocab_size"), notes


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file $DATA/gpt2-vocab.json", 50304),
        ("--tokenizer-type TikTokenizer --tokenizer-model $VOCAB", 131072),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /models/llama-2-13b/tokenizer.model", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B-Instruct", 128256),
        ("--tokenizer-model $ROOT/Meta-Llama-3-70B/tokenizer.model", 128256),
        ("--tokenizer-name-or-path ./model_from_hf/Qwen2.5-7B/", 152064),
        ("--tokenizer-name-or-path /models/qwen2.5-1.5b-hf", 151936),
        ("--tokenizer-name-or-path /models/Qwen3-30B-A3B", 151936),
        ("--tokenizer-model deepseek-ai/DeepSeek-V3-Base", 129280),
        ("--tokenizer-model deepseek-ai/DeepSeek-V2-Lite", 102400),
        ("--tokenizer-model mistralai/Mistral-7B-v0.1", 32000),
        ("--tokenizer-model mistralai/Mistral-7B-Instruct-v0.3", 32768),
        ("--tokenizer-model mistralai/Mixtral-8x7B-v0.1", 32000),
        ("--tokenizer-model /data/baichuan2_13b", 125696),
        ("--tokenizer-model gpt2 --make-vocab-size-divisible-by 1", 50257),
    ],
)
def test_a_known_tokenizer_gives_the_vocabulary(flags, rows):
    """The size of a known tokenizer is used, padded like a stated one, and a note says which flag names it."""
    found, notes = vocabulary_of(flags)

    assert found == rows
    assert len(notes) == 1
    assert re.search(r"which --[a-z-]+ \(line 2\) names; --vocab-size replaces it$", notes[0])


@pytest.mark.parametrize(
    "flags",
    [
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model $LLAMA3_PATH",
        "--tokenizer-model /models/llama-33b",
        "--tokenizer-model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        # a class reads any vocabulary: 99,584 and 196,608 were published with the first
        "--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL}",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --vocab-file gpt2-vocab.json",
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /data/spm/mixed.model",
        "--tokenizer-type GPT2BPETokenizer --vocab-file $VOCAB",
        "--tokenizer-type GPT2BPETokenizer --patch-tokenizer-type Qwen2Tokenizer",
        "--tokenizer-model mistralai/Mixtral-8x22B-Instruct-v0.1",
        "--bf16",
    ],
)
def test_other_tokenizers_give_no_vocabulary(flags):
    """Neither the name of a variable nor a similar name of another model counts: the size is then asked for."""
    assert vocabulary_of(flags) == (None, [])


def pieces(count):
    """A SentencePiece model of so many pieces, with the fields of its trainer behind them."""
    one = b"\x0a\x03abc"  # field 1 of a piece: its text
    piece = b"\x0a" + bytes([len(one)]) + one
    return piece * count + b"\x12\x02\x18\x01"


ADDED = [{"id": 2, "content": "<s>"}, {"id": 300, "content": "x"}]
FILES = {
    "config.json": {"model_type": "llama", "vocab_size": 99584},
    "text/config.json": {"text_config": {"vocab_size": 1000}},
    "own/tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": ADDED},
    "unigram/tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}},
    "gpt/vocab.json": {"a": 0, "b": 1, "c": 2},
}


@pytest.mark.parametrize(
    ("named", "rows"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}", 99584),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model '{folder}/tokenizer.model'", 99584),
        ("--tokenizer-model {folder}/text", 1000),
        ("--tokenizer-model {folder}/own/tokenizer.json", 301),
        ("--tokenizer-model {folder}/unigram", 2),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/gpt/vocab.json --merge-file merges.txt", 3),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model {folder}/spm/mixed.model", 700),
    ],
)
def test_the_tokenizers_own_files_state_the_vocabulary(tmp_path, named, rows):
    """Files that are here count before any name: config.json, tokenizer.json, vocab.json and SentencePiece's pieces."""
    for name, content in FILES.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "spm").mkdir()
    for name, count in (("spm/mixed.model", 700), ("tokenizer.model", 5)):
        (tmp_path / name).write_bytes(pieces(count))

    found, notes = vocabulary_of(f"{named.format(folder=tmp_path)} --make-vocab-size-divisible-by 1")

    assert found == rows
    assert "names; --vocab-size replaces it" in notes[0]


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x0a\x7f", b"IQ== 0\nIg== 1\n", b"[" * 5000])
def test_other_files_state_nothing(tmp_path, content):
    """A file that is no SentencePiece model, or is cut off, leaves the size open."""
    for name in ("tokenizer.model", "tokenizer.json", "vocab.json", "config.json"):
        (tmp_path / name).write_bytes(content)

    for name in ("", "/tokenizer.model", "/tokenizer.json", "/vocab.json"):
        assert vocabulary_of(f"--tokenizer-model {tmp_path}{name}") == (None, [])


def test_the_question_says_why_it_is_asked():
    """What is missing names the flag that was expected to say it."""
    imported = IMPORTERS["megatron"](
        f"torchrun pretrain_gpt.py {SIZES} \\\n --tokenizer-type Llama2Tokenizer --tokenizer-model $MODEL"
    )

    assert imported.missing["vocab_size"] == (
        "--vocab-size is not there, and --tokenizer-type (line 2) does not fix it: the tokenizer's files are not here, "
        "or do not say it"
    )


def test_a_stated_size_counts():
    """Beside a stated size the tokenizer is not asked."""
    assert vocabulary_of("--vocab-size 1000 --tokenizer-type GPT2BPETokenizer") == (1024, [])


def test_every_vocabulary_has_a_source_and_finds_itself():
    """Each entry of the catalog has a source with a name that its own pattern, and no earlier one, finds."""
    for known in vocabularies():
        assert known.source
        first = next(one for one in vocabularies() if re.search(one.pattern, known.source.partition(";")[0].lower()))
        assert first.rows == known.rows, known.name
