"""Arguments that Megatron-LM, MindSpeed-LLM and Megatron-DeepSpeed print when they start.

Each line has the name of an argument, dots up to column 48 and the value; the names are those of the flags with
underscores. A switch is True or False, whatever flag turns it.

Sources: Megatron-LM megatron/training/arguments.py (`_print_args`, `validate_args`), also of its releases 2.0 to 3.0;
MindSpeed-LLM mindspeed_llm/training/arguments.py, `print_args`; Megatron-DeepSpeed megatron/arguments.py and
megatron/global_vars.py (the padded vocabulary).
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from dataclasses import dataclass, replace

from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import KEEPS_WEIGHTS, names_in
from tuner.imports.imported import Imported
from tuner.imports.log.block import MOST_LINES, AbstractFinder
from tuner.imports.log.lines import Line
from tuner.imports.megatron import import_megatron

BEGIN, END = "- arguments -", "- end of arguments -"
"""Parts of the first and of the last line, which GPT-NeoX prints too."""
_ARGUMENT = re.compile(r"(?:^|\s)([A-Za-z_]\w*) (\.{2,}) ?(.*)$")
_OF_GPT_NEOX = re.compile(r"^\s*\w+ \.* .*(?:default|updated)$")
"""Line of GPT-NeoX, which says behind each value whether it is the default."""
_LONG_ARGUMENT = re.compile(r"^\s*(\w{46,}) \.? ?(.*)$")
"""Line of an argument whose name leaves no room for two dots."""
VOCABULARY = re.compile(r"padded vocab \(size: ([0-9]{1,9})\)")
_BUILDS = re.compile(r"^\s*building (\w+) model\b", re.IGNORECASE)

_RENAMED = {name: flag for flag, name in names_in("printed").items()}
"""Flag of an argument that is stored under another name."""
_WHEN_FALSE = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "torch_fsdp2_reshard_after_forward": KEEPS_WEIGHTS,
}
"""Flag that an argument of False stands for."""
_LEFT_OUT = {
    "num_layers_per_virtual_pipeline_stage",  # both are resolved to virtual_pipeline_model_parallel_size
    "num_virtual_stages_per_pipeline_rank",
    "recompute_activations",  # resolved to recompute_granularity
}
_DEFAULTS = {
    "bert_embedder_type": "megatron",
    "img_h": "224",
    "img_w": "224",
    "mask_prob": "0.15",
    "vision_pretraining_type": "classify",
}
"""Defaults of arguments of other models, which every program prints, and which only these are given."""
_FLASH = ("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
"""Switches of kernels that keep no scores; the later ones are Megatron-DeepSpeed's."""
_ONE_WORD = {"moe_layer_freq", "pipeline_model_parallel_layout", "noop_layers"}
"""Arguments whose flag takes a list as one word."""
_POSITIONS = {"absolute": "learned_absolute", "rotary": "rope"}
_OTHER_MODELS = {"lora_target_modules": "LoRA trains few of the weights"}
"""Arguments of training that Meshtune has no model for."""
_HYBRID = ("HYBRID", "MAMBA")
"""Models whose layers are state spaces where no pattern says otherwise (pretrain_hybrid.py, pretrain_mamba.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Argument:
    value: str
    line: int


class MegatronArguments(AbstractFinder):
    """Finder of the block of arguments, and of the lines that say the vocabulary and the kind of the model."""

    def __init__(self) -> None:
        self._arguments: dict[str, _Argument] = {}
        self._begun: Line | None = None
        self._is_open = False
        self._vocab_size: int | None = None
        self._builds = ""

    def begins(self, line: Line) -> bool:
        """Return whether the line is the head of the block."""
        return BEGIN in line.text and line.text.strip().endswith("-")

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self.begins(line):
            self.__init__()  # type: ignore[misc] # a new start replaces what was printed before
            self._begun, self._is_open = line, True
        elif self._is_open:
            self._take_argument(line)
        elif self._begun is not None:
            if (found := VOCABULARY.search(line.text)) is not None:
                self._vocab_size = int(found[1])
            elif not self._builds and (found := _BUILDS.match(line.text)) is not None:
                self._builds = found[1]

    def _take_argument(self, line: Line) -> None:
        assert self._begun is not None, "the block has begun"
        if END in line.text:
            self._is_open = False
        elif line.number - self._begun.number > MOST_LINES:
            self._raise_cut_off()
        elif not self._arguments and _OF_GPT_NEOX.match(line.text) is not None:
            self._begun, self._is_open = None, False
        elif (found := _ARGUMENT.search(line.text)) is not None:
            self._arguments[found[1]] = _Argument(value=found[3].strip(), line=line.number)
        elif (found := _LONG_ARGUMENT.match(line.text)) is not None:
            self._arguments[found[1]] = _Argument(value=found[2].strip(), line=line.number)

    def _raise_cut_off(self) -> None:
        assert self._begun is not None, "the block has begun"
        raise ConfigError(
            "the printed arguments have no end",
            key=f"line {self._begun.number}",
            value=self._begun.text.strip()[:80],
            nearest=f"a log with all lines up to `{'-' * 20} end of arguments {'-' * 21}`",
        )

    def imported(self) -> Imported | None:
        """Return what the arguments say."""
        if self._begun is None:
            return None
        if self._is_open:
            self._raise_cut_off()
        self._check_model()
        flags, lines = self._flags()
        try:
            imported = import_megatron(" \\\n".join(flags), is_log=True)
        except ConfigError as error:
            raise _on_lines(error, lines) from None
        imported = replace(
            imported,
            unread=tuple(replace(one, line=_line_in(lines, one.line)) for one in imported.unread),
            doubts=tuple(replace(one, line=_line_in(lines, one.line)) for one in imported.doubts),
            open={name: _without_line(why) for name, why in imported.open.items()},
        )
        degrees = dict(imported.degrees)
        used = math.prod(degrees.get(name, 1) for name in ("pp", "tp", "cp", "up"))
        world_size = self._number("world_size")
        assert world_size is not None, "checked before"
        if world_size % used:
            raise ConfigError(
                f"must be a multiple of pp * tp * cp = {used}",
                key=f"line {self._arguments['world_size'].line}: world_size",
                value=world_size,
            )
        degrees["dp"] = world_size // used
        return replace(imported, degrees=degrees, facts={**imported.facts, **self._kernel()})

    def _kernel(self) -> dict[str, str]:
        """Return the fact on attention of Megatron-LM's own layers, which have a flash kernel only where asked for.

        Transformer Engine chooses the kernel itself, and an `attention_backend` is read with the flags; `auto` is no
        choice of Megatron-LM's own layers.
        """
        implementation, backend = self._value("transformer_impl"), self._value("attention_backend")
        asked = any(self._value(name) == "True" for name in _FLASH)
        asked = asked or (backend is not None and not (implementation == "local" and backend.endswith("auto")))
        return {"attention": "unfused"} if implementation in (None, "local") and not asked else {}

    @property
    def _is_deepspeed(self) -> bool:
        return self._value("deepspeed") == "True"

    def _value(self, name: str) -> str | None:
        """Return the printed value of an argument; None if it is not there or None."""
        found = self._arguments.get(name)
        return None if found is None or found.value in ("None", "") else found.value

    def _number(self, name: str) -> int | None:
        text = self._value(name)
        return int(float(text)) if text is not None and re.fullmatch(r"[0-9]{1,9}(\.0)?", text) else None

    def _check_model(self) -> None:
        """Check that the log is that of Megatron-LM, and its model a decoder.

        Raises:
            ConfigError: Another program prints its arguments in this form, or trains something else.
        """
        assert self._begun is not None, "the block has begun"
        if self._number("world_size") is None:
            raise ConfigError(
                "the printed arguments have no world_size, so that they are not those of Megatron-LM",
                key=f"line {self._begun.number}",
                nearest="a log of a framework that `meshtune init` knows",
            )
        if self._builds and self._builds.upper() not in ("GPT", "MCORE", *_HYBRID):
            raise ConfigError(
                f"the program builds a {self._builds} model, and Meshtune knows decoders only",
                nearest="a model of its own by --from-hugging-face, or a study file written by hand",
            )
        for name, what in _OTHER_MODELS.items():
            if self._value(name) not in (None, "[]", "False"):
                argument = self._arguments[name]
                raise ConfigError(
                    f"is not supported: {what}", key=f"line {argument.line}: {name}", value=argument.value[:80]
                )

    def _flags(self) -> tuple[list[str], list[int]]:
        """Return the flags that would lead to the printed arguments, one per entry, and their lines in the log."""
        flags: list[str] = []
        lines: list[int] = []
        for name, argument in self._resolved().items():
            for words in _words_of(name, argument.value):
                flags.append(shlex.join(words))
                lines.append(argument.line)
        return flags, lines

    def _resolved(self) -> dict[str, _Argument]:
        """Return the arguments, with those of old versions under the names of today."""
        found = {
            name: argument
            for name, argument in self._arguments.items()
            if name not in _LEFT_OUT and argument.value != _DEFAULTS.get(name)
        }
        assert self._begun is not None, "the block has begun"

        def put(name: str, value: str) -> None:
            line = found[name].line if name in found else self._begun.number if self._begun else 0
            found[name] = _Argument(value=value, line=line)

        if self._vocab_size is not None and self._value("padded_vocab_size") is None:
            put("vocab_size", str(self._vocab_size))
        kind = (self._value("position_embedding_type") or "").rpartition(".")[2]
        if self._value("use_rotary_position_embeddings") == "True":
            found.pop("position_embedding_type", None)
        elif kind:
            put("position_embedding_type", _POSITIONS.get(kind, kind))
        method = self._value("activations_checkpoint_method")
        all_layers = self._value("checkpoint_activations") == "True" or (
            method is not None and "activations_checkpoint_granularity" not in found
        )
        if all_layers:
            put("recompute_granularity", "full")
            if method is not None:
                put("recompute_method", method)
        if self._builds.upper() in _HYBRID:
            put("is_hybrid_model", "True")
        if re.fullmatch(r"-1|None", self._value("first_k_dense_replace") or "-1"):
            found.pop("first_k_dense_replace", None)
        if self._value("normalization") == "rmsnorm":  # so spelled by Megatron-DeepSpeed
            put("normalization", "RMSNorm")
        if not self._is_deepspeed:
            found.pop("zero_stage", None)
        elif "zero_stage" in found:  # some versions print 1.0
            put("zero_stage", str(self._number("zero_stage") or 0))
        self._resolve_experts(found)
        return found

    def _resolve_experts(self, found: dict[str, _Argument]) -> None:
        """Bring the number of experts into form: one is none, and Megatron-DeepSpeed has a list of numbers."""
        text = self._value("num_experts")
        if text is None:
            return
        numbers = {int(number) for number in re.findall(r"[0-9]{1,6}", text)}
        if numbers <= {0, 1}:
            del found["num_experts"]
            return
        if not text.startswith("["):
            return
        found["num_experts"] = _Argument(value=str(max(numbers)), line=found["num_experts"].line)


def _words_of(name: str, value: str) -> list[list[str]]:
    """Return the flag of an argument with its values, or nothing if the flag was not given."""
    flag = _RENAMED.get(name, f"--{name.replace('_', '-')}")
    if value in ("None", "", "[]"):
        return []
    if value == "False":
        return [[_WHEN_FALSE[name]]] if name in _WHEN_FALSE else []
    if value == "True":
        return [[flag]]
    if name in _ONE_WORD:
        return [[flag, value.replace(" ", "").strip("{}") if name == "noop_layers" else value.replace(" ", "")]]
    if value.startswith("["):
        return [[flag, *_items(value)]]
    return [[flag, value]]


def _items(text: str) -> list[str]:
    """Return the items of a printed list; the text itself if it is not the list of plain values."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [text]
    return [str(item) for item in found]


def _line_in(lines: list[int], number: int | None) -> int | None:
    """Return the line of the log from which a line of the flags was made."""
    return lines[number - 1] if number is not None and 0 < number <= len(lines) else None


def _without_line(why: str) -> str:
    return re.sub(r" \(line [0-9]+\)", "", why)


def _on_lines(error: ConfigError, lines: list[int]) -> ConfigError:
    """Return the error with the line of the log in place of that of the flags."""

    def number(found: re.Match[str]) -> str:
        return f"line {_line_in(lines, int(found[1]))}"

    key = re.sub(r"^line ([0-9]+)", number, error.key) if error.key else error.key
    return ConfigError(error.rule, key=key, value=error.value, nearest=error.nearest)
