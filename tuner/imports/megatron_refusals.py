"""Programs that take Megatron-LM's flags and train something else than a whole decoder-only transformer.

Each is refused, together with what Meshtune would need: read as a GPT, its step time and memory would be wrong.

Sources: Megatron-LM's pretrain_*.py and megatron/training/arguments.py (add_bert_args, add_vision_args, add_retro_args,
add_ssm_args, add_experimental_attention_variant_args), MindSpeed-LLM's --lora-*, --use-lora and --stage, NeMo's and
Megatron-Bridge's --peft.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.io.errors import ConfigError
from tuner.imports.flags import Flags


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Kind of training that is not modelled.

    Attributes:
        what: Its name.
        needs: What a model of its step would need.
        programs: Beginnings of the programs' names.
        parts: Texts anywhere in the programs' names.
        flags: Flags that only this kind has.
        prefixes: Beginnings of such flags.
        values: Values of flags that select this kind, by flag.
    """

    what: str
    needs: str
    programs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()


_KINDS = (
    _Kind(
        what="trains nothing: it generates text, evaluates or prepares data",
        needs="a launch script that trains",
        programs=("preprocess_data",),
        parts=("text_generation", "inference", "generate_", "evaluat", "zeroshot"),
        flags=(
            "--task",
            "--prompts",
            "--num-tokens-to-generate",
            "--sample-input-file",
            "--out-seq-length",
            "--text-generate-input-file",
        ),
    ),
    _Kind(
        what="is a multimodal model, of images and text for example",
        needs="the encoders of images, video or sound beside the language model, and which weights are trained",
        parts=("vlm", "_vl", "llava", "multimodal"),
        flags=(
            *("--img-h", "--img-w", "--allow-missing-vision-projection-checkpoint"),
            *("--model-provider", "--dataset-provider", "--language-model-type", "--vision-model-type"),
            *("--freeze-ViT", "--freeze-LM", "--freeze-vision-model"),
            *("--vision-tower", "--tune-mm-mlp-adapter", "--pretrain-mm-mlp-adapter", "--mm-projector-type"),
            *("--freeze-llm", "--freeze-clip-vision-tower", "--image-folder", "--mm-data", "--mm-model", "--mm-tool"),
        ),
    ),
    _Kind(
        what="takes its model from files of Hugging Face",
        needs="the sizes of that model; `meshtune init --from-hugging-face` reads its config.json",
        flags=("--use-bridge", "--bridge-hf-model"),
    ),
    _Kind(
        what="trains adapters (LoRA)",
        needs="memory and time of frozen weights with small trained matrices beside them; remove the flag to study the "
        "training of all weights",
        flags=("--use-lora", "--qlora", "--is-lora", "--enable-lora", "--use-peft", "--use-peft-lora"),
        prefixes=("--lora-", "--qlora-"),
        values=(
            *(("--peft", ("lora", "qlora", "dora")), ("--peft-type", ("lora", "qlora", "dora"))),
            ("--finetuning-type", ("lora", "freeze", "oft")),
        ),
    ),
    _Kind(
        what="is a T5 model",
        needs="an encoder and a decoder with cross attention, each with its own layers and sequence length",
        programs=("pretrain_t5", "train_t5", "finetune_t5"),
        flags=("--decoder-num-layers",),
    ),
    _Kind(
        what="is a BERT model",
        needs="attention without a causal mask, and heads for masked words and pairs of sentences",
        programs=("pretrain_bert", "pretrain_ict", "pretrain_realm"),
        flags=("--bert-no-binary-head", "--bert-embedder-type", "--bert-load", "--mask-prob"),
    ),
    _Kind(
        what="is a model of images alone",
        needs="patches in place of tokens and attention without a causal mask",
        programs=("pretrain_vision", "pretrain_vit"),
        flags=("--vision-pretraining", "--vision-pretraining-type"),
    ),
    _Kind(
        what="retrieves text while it trains (RETRO)",
        needs="the encoder of neighbours and chunked cross attention",
        programs=("pretrain_retro",),
        flags=("--retro-add-retriever",),
    ),
    _Kind(
        what="has state-space layers that are not Mamba's",
        needs="the sizes of their states; `model:` of a study may list the blocks that docs/models.md names",
        parts=("rwkv",),
        prefixes=("--ssm-",),
    ),
    _Kind(
        what="has linear attention",
        needs="kernels and states of linear attention, and which layers have it",
        flags=("--use-linear-attention", "--linear-attention", "--use-lightning-attention"),
        values=(("--experimental-attention-variant", ("kimi_delta_attention", "linear")),),
    ),
    _Kind(
        what="trains on preferences or rewards",
        needs="the passes of a reference or reward model beside those of the trained one, and the generation of text",
        flags=("--perform-rl-step", "--ref-model", "--reward-model", "--advantage-estimator"),
        prefixes=("--actor-", "--critic-", "--rollout-"),
        values=(
            ("--stage", ("dpo", "simpo", "orm", "prm", "rm", "ppo", "kto", "ray_ppo", "ray_online_dpo", "ray_grpo")),
        ),
    ),
    _Kind(
        what="learns from a teacher model",
        needs="the passes of the teacher beside those of the trained model",
        flags=("--mos", "--kd", "--load-teacher", "--export-kd-teacher-load", "--export-kd-cfg"),
    ),
    _Kind(
        what="trains only a part of the weights",
        needs="which weights have gradients and optimizer states",
        flags=("--freeze-all-layers",),
    ),
    _Kind(
        what="has layers of unlike sizes, which stand in a file",
        needs="the sizes of each layer",
        flags=("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
    ),
    _Kind(what="trains on several meshes", needs="degrees for each mesh", flags=("--enable-hetero",)),
    _Kind(
        what="takes its arguments from a YAML file",
        needs="these arguments as flags, or the log of a training: `meshtune init --from-log`",
        flags=("--yaml-cfg",),
    ),
    _Kind(what="searches for parallel degrees itself", needs="a launch script that trains", flags=("--auto-settings",)),
)


def refuse_other_models(flags: Flags, names: tuple[str, ...], program: str) -> None:
    """Refuse a program that trains something else than a whole decoder-only transformer.

    Args:
        flags: Flags of the program.
        names: Names of all flags.
        program: Name of the program's file; empty if unknown.

    Raises:
        ConfigError: the program or a flag is of another kind of training; the message says what it would need.
    """
    for kind in _KINDS:
        key = _sign(kind, flags, names, program)
        if key:
            raise ConfigError(
                f"{kind.what}; Meshtune does not model this, and would need {kind.needs}", key=flags.place(key)
            )


def _sign(kind: _Kind, flags: Flags, names: tuple[str, ...], program: str) -> str:
    """Return the program or the first flag that is of this kind, or an empty text."""
    name = program.removesuffix(".py").rsplit(".", 1)[-1]
    if (kind.programs and name.startswith(kind.programs)) or any(part in name for part in kind.parts):
        return program
    for name in names:
        if name in kind.flags or (kind.prefixes and name.startswith(kind.prefixes)):
            return name
    for name, values in kind.values:
        if name in names and flags.text(name) in values:
            return name
    return ""
