import json

import pytest
import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.sequences import Sequences
from tests.unit.tuner.export.test_export import megatron, setting_of
from tuner.export import EXPORTERS, find_exporter

PACKED = Sequences(lengths=(512, 2048, 8192), shares=(0.6, 0.3, 0.1))
PADDED = Sequences(lengths=(512, 2048), shares=(0.6, 0.4), layout="padded")
BALANCED = Sequences(lengths=(512, 8192), shares=(0.6, 0.4), order="balanced")


def export(target, sequences, **degrees):
    """The export of a configuration of a job with such sequences."""
    return find_exporter(target)(setting_of(sequences=sequences), ParallelConfig(**degrees))


def noted(found):
    """The notes on sequences."""
    return [note for note in found.notes if note.startswith("sequences:")]


def test_megatron_packs_by_a_flag():
    """Packed sequences are --sft, with rows of --seq-length; padded ones have no flag, and a note says so."""
    packed, padded = (megatron(setting_of(sequences=one), dp=64) for one in (PACKED, PADDED))

    assert "--sft" in packed.arguments
    assert "--sft" not in padded.arguments
    assert "pads every sequence to --seq-length" in noted(padded)[0]


def test_flagscale_has_megatrons_flag():
    """FlagScale's file has the key that becomes --sft."""
    assert yaml.safe_load(export("flagscale", PACKED, dp=64).text)["system"]["sft"] is True


def test_mindspeed_packs_and_pads_by_flags():
    """Both layouts have flags; a context parallel run needs a general mask."""
    assert "--neat-pack" in export("mindspeed", PACKED, dp=64).arguments
    assert "general" not in export("mindspeed", PACKED, dp=64).arguments
    assert "general" in export("mindspeed", PACKED, dp=32, cp=2).arguments
    assert "--variable-seq-lengths" in export("mindspeed", PADDED, dp=64).arguments


def test_nemo_makes_one_row_of_a_micro_batch():
    """NeMo takes micro-batches of one packed row: two rows become one of twice the tokens, the batch half as many."""
    text = export("nemo", PACKED, dp=64, mbs=2).text
    found = dict(line.strip().removeprefix("recipe.").split(" = ", 1) for line in text.splitlines() if " = " in line)

    compile(text, "recipe.py", "exec")
    assert found["data.micro_batch_size"] == "1"
    assert found["data.global_batch_size"] == "256"
    assert found["data.seq_length"] == found["model.config.seq_length"] == "16384"
    assert found["data.packed_sequence_specs"] == "run.Config(PackedSequenceSpecs, packed_sequence_size=16384)"
    assert "packed" not in export("nemo", None, dp=64, mbs=2).text


def test_json_says_the_tokens_of_a_micro_batch():
    """The object holds what frameworks want that limit a micro-batch by its tokens."""
    packed, padded = (json.loads(export("json", one, dp=64, mbs=2).text)["job"] for one in (PACKED, PADDED))

    assert packed["micro_batch_tokens"] == 2 * 8192
    assert packed["sequences"]["layout"] == "packed"
    assert padded["micro_batch_tokens"] == 2 * 2048
    assert "sequences" not in json.loads(export("json", None, dp=64).text)["job"]


@pytest.mark.parametrize("target", sorted(set(EXPORTERS) - {"json"}))
@pytest.mark.parametrize("sequences", [PACKED, PADDED, BALANCED])
def test_what_a_framework_cannot_say_is_noted(target, sequences):
    """Every framework's export says what it leaves to the data, and jobs of equal sequences have no such note."""
    found = export(target, sequences, dp=64)

    if target != "mindspeed" or sequences.is_packed:
        assert noted(found)
    if sequences.order == "balanced":
        assert any("balances rows" in note for note in noted(found))
    assert not noted(export(target, None, dp=64))
