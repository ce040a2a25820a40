"""Files of StableHLO modules: text, MLIR bytecode, portable artifacts and files of `jax.export`.

MLIR's own parser reads them, through the bindings that come with JAX. Messages name an operator's line in a text. In a
text that says where its operators come from (`as_text(debug_info=True)`), an operator is found by counting its name.

Source: the StableHLO specification (https://openxla.org/stablehlo/spec), and its page on bytecode and compatibility.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input

KEY = "--stablehlo"
"""Option that names a file."""
BYTECODE = b"ML\xefR"
"""First bytes of MLIR's bytecode."""
MOST_BYTES = 2**31
"""Most bytes of a file: a module may hold the weights of a model as constants."""
_OF_PARSER = "-"
"""File name that MLIR's parser gives to a text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StableModule:
    """A module that was read.

    Attributes:
        path: File of the module.
        functions: Functions of the module by their names.
        text: Text of the file; None for bytecode.
    """

    path: Path
    functions: dict[str, ir.Operation]
    text: str | None
    _module: ir.Module

    @property
    def name(self) -> str:
        """Name of the module, as `jax.jit` gives it to a function; else that of its file."""
        attributes = self._module.operation.attributes
        own = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""
        return re.sub(r"^jit_", "", own) or self.path.stem

    def find_main(self) -> ir.Operation:
        """Return the function that the module runs.

        Raises:
            ConfigError: It has none.
        """
        public = [
            each
            for each in self.functions.values()
            if "sym_visibility" not in each.attributes
            or ir.StringAttr(each.attributes["sym_visibility"]).value == "public"
        ]
        main = self.functions.get("main") or (public[0] if len(public) == 1 else None)
        if main is None:
            rule = f"has no function main, but {', '.join(self.functions) or 'none'}"
            raise ConfigError(rule, key=KEY, value=str(self.path), nearest="a module with one public function")
        return main

    def has_types(self, kinds: Collection[str]) -> bool:
        """Return whether a value of the module has one of these element types."""
        return any(
            isinstance(result.type, ir.RankedTensorType) and str(result.type.element_type) in kinds
            for op in _walk(self._module.operation)
            for result in (
                *op.results,
                *(each for region in op.regions for block in region.blocks for each in block.arguments),
            )
        )

    def refuse(self, op: ir.Operation, rule: str, nearest: str | None = None) -> ConfigError:
        """Return the error for an operator that cannot be read, with its name and its place in the file."""
        return ConfigError(
            f"{self._place_of(op)}: {name_of(op)} {rule}", key=KEY, value=str(self.path), nearest=nearest
        )

    def _place_of(self, op: ir.Operation) -> str:
        where = op.location
        if isinstance(where, ir.FileLineColLoc) and where.filename == _OF_PARSER:
            return f"line {where.start_line}"
        if self.text is None:
            return str(where)
        before = 0
        for other in _walk(self._module.operation):
            if other == op:
                break
            before += other.name == op.name
        found = [match.start() for match in re.finditer(rf"(?<![\w.]){re.escape(op.name)}(?![\w.])", self.text)]
        return f"line {self.text.count(chr(10), 0, found[before]) + 1}" if before < len(found) else str(where)


def name_of(op: ir.Operation) -> str:
    """Return the name of an operator in the words of messages: a custom call's with its target."""
    attributes = op.attributes
    if "call_target_name" in attributes:
        return f"{op.name} @{ir.StringAttr(attributes['call_target_name']).value}"
    return str(op.name)


def read_module(path: Path) -> StableModule:
    """Read a module from its file.

    Raises:
        ConfigError: There is no such file, it is no module, or JAX is too old to read it.
    """
    if not hasattr(ir, "NameLoc"):  # the bindings then tell no names of arguments
        raise ConfigError(
            f"needs a later JAX than {jax.__version__}", key=KEY, value=str(path), nearest="pip install -U jax"
        )
    data, text = read_input(path, most_bytes=MOST_BYTES), None
    if not data.startswith(BYTECODE):
        text = _decode(data)
        if text is None:
            data = _module_of_export(data, path)
    with make_ir_context() as context:
        try:
            module = ir.Module.parse(text) if text is not None else _parse_bytecode(context, data)
        except (ir.MLIRError, ValueError) as error:
            raise ConfigError(
                f"is no StableHLO module: {_in_words(error)}",
                key=KEY,
                value=str(path),
                nearest="what jax.jit(f).lower(...).as_text() or jax.export writes",
            ) from None
    functions = {
        ir.StringAttr(each.operation.attributes["sym_name"]).value: each.operation
        for each in module.body.operations
        if each.operation.name == "func.func"
    }
    return StableModule(path=path, functions=functions, text=text, _module=module)


def _decode(data: bytes) -> str | None:
    """Return the text in a file's bytes; None if they are no text."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _module_of_export(data: bytes, path: Path) -> bytes:
    """Return the bytecode in a file of `jax.export`.

    Raises:
        ConfigError: It is no such file.
    """
    try:
        return bytes(jax.export.deserialize(bytearray(data)).mlir_module_serialized)
    except ImportError as error:  # JAX reads them with flatbuffers, which it does not bring
        raise ConfigError(
            f"is no text, and files of jax.export need another package: {error}",
            key=KEY,
            value=str(path),
            nearest="write Exported.mlir_module() or .mlir_module_serialized into a file",
        ) from None
    except Exception:  # noqa: BLE001 # the reader of such files checks nothing, and fails in any way
        raise ConfigError(
            "is neither StableHLO text, MLIR bytecode nor a file of jax.export", key=KEY, value=str(path)
        ) from None


def _parse_bytecode(context: ir.Context, data: bytes) -> ir.Module:
    """Parse bytecode of StableHLO itself, or a portable artifact, whose operators have a version."""
    try:
        return stablehlo.deserialize_portable_artifact(context, data)
    except (ir.MLIRError, ValueError):
        return ir.Module.parse(data)


def _in_words(error: Exception) -> str:
    """Return the first error of MLIR's parser with its line."""
    found = re.search(rf'error: "{_OF_PARSER}":(\d+):(\d+): (.*)', str(error))
    return f"line {found[1]}: {found[3].strip()}" if found else str(error).strip().splitlines()[-1]


def _walk(op: ir.Operation) -> Iterator[ir.Operation]:
    """Yield all operators in an operator, in the order of a text."""
    for region in op.regions:
        for block in region.blocks:
            for each in block.operations:
                yield each.operation
                yield from _walk(each.operation)


def attribute(op: ir.Operation, name: str, default: Any = None) -> Any:
    """Return an attribute of an operator as Python's own value, or else the default."""
    return _plain(op.attributes[name]) if name in op.attributes else default


_WRAPPERS = (
    stablehlo.ComparisonDirectionAttr,
    stablehlo.ComparisonTypeAttr,
    stablehlo.PrecisionAttr,
    stablehlo.FftTypeAttr,
    stablehlo.TransposeAttr,
    stablehlo.RngAlgorithmAttr,
)
"""Attributes with a word."""
_NUMBERS = (
    stablehlo.DotDimensionNumbers,
    stablehlo.ConvDimensionNumbers,
    stablehlo.GatherDimensionNumbers,
    stablehlo.ScatterDimensionNumbers,
)
"""Attributes that number dims."""


def _plain(value: ir.Attribute) -> Any:
    if isinstance(value, (ir.DenseI64ArrayAttr, ir.DenseI32ArrayAttr, ir.DenseBoolArrayAttr)):
        return list(value)
    if isinstance(value, ir.ArrayAttr):
        return [_plain(each) for each in value]
    if isinstance(value, (ir.IntegerAttr, ir.BoolAttr, ir.StringAttr, ir.FlatSymbolRefAttr)):
        return value.value
    for kind in _WRAPPERS:
        if kind.isinstance(value):
            return kind(value).value
    for numbers in _NUMBERS:
        if numbers.isinstance(value):
            return numbers(value)
    return value
