"""Exported fields of a NeMo 2 recipe, checked with Megatron-LM's rules for the corresponding flags.

Sources: NeMo lightning/pytorch/strategies/megatron_strategy.py (arguments of `MegatronStrategy.__init__`, `fsdp` and
the format of its checkpoints); for all other rules see megatron.py, because NeMo runs on megatron-core.
"""

from __future__ import annotations

import ast

from hardware.io.errors import ConfigError, did_you_mean
from tests.oracles.frameworks.megatron import MEGATRON_RULES, said_by_megatron
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, check_rules, number
from tuner.export.flag_table import Flag, FlagValue, Values
from tuner.export.megatron_flags import MEGATRON_FLAGS
from tuner.export.nemo import DTYPES, FIELDS

NODES, DEVICES = "trainer.num_nodes", "trainer.devices"
FSDP, FORMAT, DTYPE = "trainer.strategy.fsdp", "trainer.strategy.save_ckpt_format", "trainer.strategy.pipeline_dtype"
OPTIMIZER = "trainer.strategy.ddp.use_distributed_optimizer"
_OWN: dict[str, Flag] = {
    NODES: Flag(),
    DEVICES: Flag(),
    FSDP: Flag(kind="word", choices=("megatron", "pytorch")),
    FORMAT: Flag(kind="word", choices=("torch_dist", "zarr", "fsdp_dtensor")),
    DTYPE: Flag(kind="word", choices=(*sorted(set(DTYPES.values())), "torch.float32")),
    OPTIMIZER: Flag(kind="switch"),
}
_KINDS = {path: MEGATRON_FLAGS[flag] for flag, path in FIELDS.items()} | _OWN
_FLAGS = {path: flag for flag, path in FIELDS.items()}
_STRATEGY = "NeMo lightning/pytorch/strategies/megatron_strategy.py MegatronStrategy"

NEMO_RULES: tuple[PublishedRule, ...] = (
    *(at_least(1, key, "NeMo lightning/pytorch/trainer.py") for key in (NODES, DEVICES)),
    PublishedRule(
        key=NODES,
        rule="times trainer.devices must be the world size",
        source="NeMo lightning/pytorch/trainer.py",
        holds=lambda v, f: NODES not in v or number(v, NODES) * number(v, DEVICES) == f.num_devices,
    ),
    PublishedRule(
        key=DTYPE,
        rule="is required with a pipeline",
        source="megatron-core model_parallel_config.py __post_init__",
        holds=lambda v, _: number(v, "--pipeline-model-parallel-size") == 1 or v.get(DTYPE) is not None,
    ),
    PublishedRule(
        key=OPTIMIZER,
        rule="must equal the value in the optimizer's configuration",
        source=f"{_STRATEGY}.connect",
        holds=lambda v, _: bool(v.get(OPTIMIZER)) == bool(v.get("--use-distributed-optimizer")),
    ),
    PublishedRule(
        key=FSDP,
        rule="must be megatron if ddp.use_megatron_fsdp is true, otherwise None",
        source=f"{_STRATEGY}.__init__",
        holds=lambda v, _: (v.get(FSDP) == "megatron") == bool(v.get("--use-megatron-fsdp")),
    ),
)


def check_nemo(text: str, facts: Facts) -> dict[str, FlagValue]:
    """Return the values that the code sets, by Megatron-LM's flag if there is one, otherwise by field.

    Raises:
        ConfigError: the text is not such code, or NeMo or its core would reject it; the message cites the rule.
    """
    fields = read_nemo(text)
    values: dict[str, FlagValue] = {}
    for path, value in fields.items():
        if path not in _KINDS:
            raise ConfigError("is not a field of a recipe", value=path, nearest=did_you_mean(path, _KINDS))
        values[_FLAGS.get(path, path)] = _check_kind(path, value, _KINDS[path])
    check_rules(values, facts, NEMO_RULES)
    shared = {flag: value for flag, value in values.items() if flag in MEGATRON_FLAGS}
    if values.get(FORMAT) is not None:
        shared["--ckpt-format"] = values[FORMAT]
    # the precision of a recipe is set by a plugin, not by a field
    shared["--bf16"] = True
    check_rules(shared, facts, MEGATRON_RULES)
    return values


def read_nemo(text: str) -> dict[str, FlagValue]:
    """Return the unchecked fields of the recipe that the code sets, by path.

    Raises:
        ConfigError: the text is not Python, or a value is not a literal.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        raise ConfigError("is not Python", value=text) from None
    found: dict[str, FlagValue] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            path = ast.unparse(node.targets[0]).removeprefix("recipe.")
            found[path] = _evaluate_literal(path, node.value)
    return found


def _evaluate_literal(path: str, node: ast.expr) -> FlagValue:
    """Return the value of a literal; an attribute such as torch.bfloat16 is returned as text."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise ConfigError("must be a literal", key=path, value=ast.unparse(node)) from None
    return tuple(value) if isinstance(value, list) else value


def _check_kind(path: str, value: FlagValue, kind: Flag) -> FlagValue:
    """Check that a value has the kind of its flag, and return it.

    The communication type is one word in a recipe but a list of words as a flag of Megatron-LM.

    Raises:
        ConfigError: the value has another type, or is not among the choices of its flag.
    """
    if value is None:
        return None
    wanted: type = {"switch": bool, "number": int, "word": str, "words": tuple, "numbers": tuple}[kind.kind]
    if path == FIELDS["--cp-comm-type"] and isinstance(value, str):
        value = (value,)
    if type(value) is not wanted:
        raise ConfigError(f"must be of type {wanted.__name__}", key=path, value=value)
    words = value if isinstance(value, tuple) else (value,)
    for word in words:
        if kind.choices and word not in kind.choices:
            raise ConfigError("is not a choice", key=path, value=word, nearest=did_you_mean(str(word), kind.choices))
    return value


def said_by_nemo(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration."""
    return said_by_megatron(values, facts)
