"""Sequences of varying length in exports: the flags of frameworks that pack or pad them, and notes where they cannot.

Sources: Megatron-LM megatron/training/arguments.py (`--sft`, `--dataloader-inter-document-masking`, and the line that
sets `variable_seq_lengths` to False) and megatron/training/datasets/sft_dataset.py (rows are padded to --seq-length);
MindSpeed-LLM mindspeed_llm/features_manager/dataset and examples/mcore/qwen3 (`--neat-pack`, `--reset-attention-mask`,
`--attention-mask-type general` with context parallelism), and its guide to fine-tuning (`--variable-seq-lengths`);
torchtitan models/common/config_utils.py (`get_attention_config`: attention is always masked by documents).
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.sequences import Sequences
from costmodels.job.setting import Setting
from tuner.export.parts import Part

_LONGER = "which takes longer than the study predicts"


def megatron_sequences(setting: Setting, _: ParallelConfig) -> Part:
    """Return Megatron-LM's flags for packed sequences, and a note for padded ones."""
    sequences = setting.job.sequences
    if sequences is None:
        return Part()
    if not sequences.is_packed:
        note = f"sequences: Megatron-LM pads every sequence to --seq-length {setting.job.sequence_length}, {_LONGER}"
        return Part(notes=(note,))
    note = (
        "sequences: --sft reads conversations that were packed into rows beforehand, and needs --tokenizer-type "
        "SFTTokenizer; documents of pretraining take --dataloader-inter-document-masking instead (megatron-core 0.19), "
        "where context parallelism splits rows and not their documents"
    )
    return Part(flags=("--sft",), notes=(note, *order_notes(sequences, "Megatron-LM")))


def mindspeed_sequences(setting: Setting, config: ParallelConfig) -> Part:
    """Return MindSpeed-LLM's flags for packed sequences, or for those padded to the longest of a micro-batch."""
    sequences = setting.job.sequences
    if sequences is None:
        return Part()
    if not sequences.is_packed:
        return Part(flags=("--is-instruction-dataset", "--variable-seq-lengths"))
    flags = ["--is-instruction-dataset", "--neat-pack", "--reset-attention-mask"]
    if config.cp * config.up > 1:
        flags.append("--attention-mask-type general")
    note = "sequences: prepare the data with --pack --neat-pack, and call posttrain_gpt.py with --stage sft --finetune"
    return Part(flags=tuple(flags), notes=(note, *order_notes(sequences, "MindSpeed-LLM")))


def torchtitan_sequences(setting: Setting, _: ParallelConfig) -> Part:
    """Return notes on the data loader of torchtitan, whose attention is always that of packed documents."""
    sequences = setting.job.sequences
    if sequences is None:
        return Part()
    if not sequences.is_packed:
        note = f"sequences: torchtitan packs documents into rows of seq_len and cannot pad them, {_LONGER}"
        return Part(notes=(note,))
    note = (
        "sequences: torchtitan's attention is masked by documents without a flag; conversations need a recipe with "
        "ChatDataLoader"
    )
    return Part(notes=(note, *order_notes(sequences, "torchtitan")))


def script_notes(setting: Setting, framework: str) -> tuple[str, ...]:
    """Return a note for frameworks whose configuration does not say how sequences fill micro-batches."""
    sequences = setting.job.sequences
    if sequences is None:
        return ()
    way = (
        f"pack rows of {setting.job.sequence_length} tokens, with attention inside each sequence only"
        if sequences.is_packed
        else "pad sequences to the longest of their micro-batch"
    )
    note = f"sequences: no key of this export says how they fill micro-batches; the data of {framework} must {way}"
    return (note, *order_notes(sequences, framework))


def order_notes(sequences: Sequences, framework: str) -> tuple[str, ...]:
    """Return a note for balanced rows, which no framework's flags ask for."""
    if sequences.order != "balanced":
        return ()
    return (f"sequences: no flag of {framework} balances rows over replicas; a data sampler of yours has to",)
