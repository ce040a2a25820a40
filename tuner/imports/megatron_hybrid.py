"""Hybrid models of Megatron-LM: a pattern names one block for each layer, state spaces, attention, MLPs or experts.

Sources: megatron-core 0.19.2 models/hybrid/hybrid_layer_allocation.py (symbols, bars, slashes, and the pattern that
ratios make), models/hybrid/hybrid_layer_specs.py (the blocks of each symbol), ssm/mamba_mixer.py (sizes and their
defaults: as many heads as twice the hidden size holds, a convolution over four tokens, no bias of products) and
training/arguments.py, `validate_args` (the pattern sets --num-layers and --mtp-num-layers); megatron-core 0.16.1
ssm/mamba_hybrid_layer_allocation.py for the older flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mamba2 import Mamba2
from costmodels.job.decoder import MAX_LAYERS, Decoder
from costmodels.job.model_spec import ModelSpec
from hardware.io.errors import ConfigError
from tuner.export.hybrid_pattern import ATTENTION, EXPERTS, LATENT, MAMBA, MLP, MTP, PIPE, SPARSE, SYMBOLS
from tuner.export.megatron_flags import MTP as MODULES
from tuner.export.megatron_flags import PATTERN
from tuner.imports.flags import Flags

OLD_PATTERN, OLD_MODULES = "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"
RATIOS = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
PROGRAMS = ("pretrain_mamba", "pretrain_hybrid")
"""Programs whose layers are state spaces where nothing else is said."""
SIZES = ("--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups", "--mamba-num-heads")
_LAYERS = "--num-layers"

Others = Mapping[str, Callable[[AbstractBlock], AbstractBlock]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """Layers of a hybrid model.

    Attributes:
        pattern: Symbol of each layer.
        segments: Layers of each virtual stage; empty if the pattern has no bars.
        predicting: Symbols of the layer of a module of multi-token prediction.
        state_size: Size of the state of one channel.
        head_dim: Size of a head of a state space.
        num_groups: Groups of heads that share inputs and outputs of the state.
        num_heads: Heads of a state space; 0 for as many as twice the hidden size holds.
        rotary: Whether attention has rotary positions.
    """

    pattern: str
    segments: tuple[int, ...] = ()
    predicting: str = ""
    state_size: int = 128
    head_dim: int = 64
    num_groups: int = 8
    num_heads: int = 0
    rotary: bool = True

    def apply(self, model: ModelSpec, others: Others) -> ModelSpec:
        """Return a plain decoder with one block for each symbol in the place of its layers.

        Args:
            model: Model of the decoder that the flags describe.
            others: Functions that make further blocks of the decoder's attention, by symbol.
        """
        symbols = {*self.pattern, *self.predicting}
        blocks = {symbol: self._block(symbol, model.plain, others) for symbol in symbols}
        return replace(
            model,
            layers=tuple((blocks[symbol],) for symbol in self.pattern),
            mtp_layer=tuple(blocks[symbol] for symbol in self.predicting),
            decoder=None,
        )

    def _block(self, symbol: str, decoder: Decoder, others: Others) -> AbstractBlock:
        if symbol == MAMBA:
            return self._state_space(decoder)
        if symbol == MLP:
            return decoder.dense_mlp()
        if symbol == EXPERTS:
            return decoder.experts()
        mixer = decoder.attention()
        if isinstance(mixer, LatentAttention):
            mixer = replace(mixer, rank_norms=False)  # the layers + and D have none
        elif isinstance(mixer, Attention):
            mixer = replace(mixer, rotary=self.rotary)
        return others[symbol](mixer) if symbol in others else mixer

    def _state_space(self, decoder: Decoder) -> Mamba2:
        return Mamba2(
            hidden_size=decoder.hidden_size,
            num_heads=self.num_heads or 2 * decoder.hidden_size // self.head_dim,
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_size=self.state_size,
            norm_size=decoder.norm_size,
        )


def hybrid_of(flags: Flags, program: str, *, is_log: bool = False) -> Hybrid | None:
    """Return the layers of a hybrid model; None if the model is none, or if its pattern cannot be read.

    What the pattern says of other flags is set among them: the numbers of layers and of modules of multi-token
    prediction, latent attention, and that each E has experts.

    Args:
        flags: Flags of the command.
        program: Name of the program's file; empty if unknown.
        is_log: Whether the flags are those that a log prints, with the defaults of all others.

    Raises:
        ConfigError: the pattern is none, or what it needs is missing.
    """
    flag, text = _pattern(flags, program)
    if not text:
        if flag == "" and not is_log and program and flags.has(*SIZES) and not program.startswith("pretrain_gpt"):
            stated = next(name for name in SIZES if flags.has(name))
            flags.doubt(stated, f"the sizes of Mamba layers, and no {PATTERN} says which layers they are")
        return None
    main, slash, modules = text.partition(MTP)
    predicting = modules.split(MTP) if slash and modules.strip(MTP) else []
    _check(flags, flag, main, predicting)
    if not predicting and flags.count(MODULES, minimum=0) and (old := flags.text(OLD_MODULES)):
        predicting = [old] * (flags.count(MODULES) or 0)
        _check(flags, OLD_MODULES, main, predicting)
    segments = tuple(len(segment) for segment in main.split(PIPE))
    pattern = main.replace(PIPE, "")
    if len(pattern) > MAX_LAYERS:
        raise ConfigError(f"must have at most {MAX_LAYERS} layers", key=flags.place(flag), value=len(pattern))
    _imply(flags, flag, pattern, predicting)
    sizes = [flags.count(name) for name in SIZES]
    is_rotary = flags.has("--use-rotary-position-embeddings")
    kind = flags.text("--position-embedding-type") or ("rope" if is_rotary else "learned_absolute")
    return Hybrid(
        pattern=pattern,
        segments=segments if len(segments) > 1 else (),
        predicting=predicting[0] if predicting else "",
        state_size=sizes[0] or 128,
        head_dim=sizes[1] or 64,
        num_groups=sizes[2] or 8,
        num_heads=sizes[3] or 0,
        rotary=kind in ("rope", "yarn", "mrope"),
    )


def _pattern(flags: Flags, program: str) -> tuple[str, str]:
    """Return the flag that says the pattern, and the pattern; both empty if the model is no hybrid."""
    for name in (PATTERN, OLD_PATTERN):
        if flags.has(name):
            return name, (flags.text(name) or "").strip()
    shares = [_share(flags, name) for name in RATIOS]
    name = program.removesuffix(".py").rsplit(".", 1)[-1]
    is_hybrid = any(shares) or flags.has("--is-hybrid-model") or name.startswith(PROGRAMS)
    if not is_hybrid:
        return "", ""
    flag = next((name for name, share in zip(RATIOS, shares, strict=True) if share), _LAYERS)
    layers = flags.count(_LAYERS)
    if layers is None or any(flags.is_unknown(name) for name in RATIOS):
        return flag, ""
    if sum(shares) > 1 or layers > MAX_LAYERS:
        raise ConfigError("makes more layers than there are", key=flags.place(flag), value=flags.text(flag))
    return flag, pattern_from_ratios(layers, *shares)


def _share(flags: Flags, name: str) -> float:
    text = flags.text(name)
    if text is None:
        return 0.0
    if not re.fullmatch(r"[01]?\.?[0-9]{0,12}(e-?[0-9])?", text) or text == "." or not 0 <= float(text or 2) <= 1:
        raise ConfigError("must be a number from 0 to 1", key=flags.place(name), value=text)
    return float(text)


def pattern_from_ratios(num_layers: int, attention: float = 0.0, mlp: float = 0.0) -> str:
    """Return the pattern of so many layers with these shares of attention and MLPs, evenly spaced, among state spaces.

    Source: megatron-core 0.19.2 models/hybrid/hybrid_layer_allocation.py, pattern_from_ratios.
    """
    found = [MAMBA] * num_layers
    others = round(num_layers * attention)
    left, sections = num_layers - others, others + 1
    for symbol, number, every in ((ATTENTION, others, left / sections), (MLP, round(num_layers * mlp), 0.0)):
        if not number:
            continue
        step = every if symbol == ATTENTION else (left - number) / number
        due = step
        for at in range(num_layers):
            if found[at] != MAMBA:
                continue
            if due < 0.5:
                found[at] = symbol
                due += step
            else:
                due -= 1
    return "".join(found)


def _check(flags: Flags, flag: str, main: str, predicting: list[str]) -> None:
    """Check a pattern as Megatron-LM does.

    Raises:
        ConfigError: a symbol is unknown, modules differ, or attention stands beside latent attention.
    """
    place = flags.place(flag)
    if strange := {*main, *"".join(predicting)} - {*SYMBOLS.values(), PIPE}:
        raise ConfigError(
            f"has symbols that Megatron-LM's hybrid models have not: {' '.join(sorted(strange))}",
            key=place,
            value=flags.text(flag),
            nearest=f"layers are {' '.join(sorted(SYMBOLS.values()))}, {PIPE} ends a stage, {MTP} begins a prediction",
        )
    if len(set(predicting)) > 1 or PIPE in "".join(predicting) or not main.replace(PIPE, ""):
        raise ConfigError(
            "needs layers before the first slash, and the same ones behind each",
            key=place,
            value=flags.text(flag),
            nearest="for example M*M*/MM/MM",
        )
    for part in (main, *predicting):
        if ATTENTION in part and (LATENT in part or SPARSE in part):
            raise ConfigError(f"cannot have {ATTENTION} beside {LATENT} or {SPARSE}", key=place, value=flags.text(flag))


def _imply(flags: Flags, flag: str, pattern: str, predicting: list[str]) -> None:
    """Set the flags that the pattern decides."""
    symbols = {*pattern, *"".join(predicting)}
    flags.imply(_LAYERS, str(len(pattern)), by=flag)
    if predicting:
        flags.imply(MODULES, str(len(predicting)), by=flag)
    if not symbols.isdisjoint((LATENT, SPARSE)):
        flags.imply("--multi-latent-attention", "", by=flag)
    if EXPERTS not in symbols:
        return
    flags.imply("--moe-layer-freq", "1", by=flag)
    if not flags.has("--num-experts"):
        raise ConfigError(f"has {EXPERTS}, and --num-experts is missing", key=flags.place(flag), value=flags.text(flag))
