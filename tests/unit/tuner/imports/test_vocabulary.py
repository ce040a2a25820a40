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
        ("--tokenizer-type GPT2BPETokenizer --vocab-file $VOCAB", 50304),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL}", 32000),
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
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --vocab-file gpt2-vocab.json", 32000),
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
        "--tokenizer-type GPT2BPETokenizer --patch-tokenizer-type Qwen2Tokenizer",
        "--tokenizer-model mistralai/Mixtral-8x22B-Instruct-v0.1",
        "--bf16",
    ],
)
def test_other_tokenizers_give_no_vocabulary(flags):
    """Neither the name of a variable nor a similar name of another model counts: the size is then asked for."""
    assert vocabulary_of(flags) == (None, [])


def test_a_stated_size_counts():
    """Beside a stated size the tokenizer is not asked."""
    assert vocabulary_of("--vocab-size 1000 --tokenizer-type GPT2BPETokenizer") == (1024, [])


def test_every_vocabulary_has_a_source_and_finds_itself():
    """Each entry of the catalog has a source with a name that its own pattern, and no earlier one, finds."""
    for known in vocabularies():
        assert known.source
        first = next(one for one in vocabularies() if re.search(one.pattern, known.source.partition(";")[0].lower()))
        assert first.rows == known.rows, known.name
