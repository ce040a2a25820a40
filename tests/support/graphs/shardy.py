"""Sharding rules of primitives according to Shardy, the partitioner that JAX includes.

A primitive may be lowered to several operators, each with a rule. Factors that share a dim of an intermediate value
are then merged. A factor is whole if any of the operators needs it whole or has no factor for it.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

import jax
from jax._src.interpreters.mlir import make_ir_context  # no public name registers the dialects of StableHLO and Shardy
from jaxlib.mlir import ir, passmanager

from costmodels.sharding.dims import FactorKind

PASSES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
KINDS = {
    "reduction": FactorKind.REDUCTION,
    "need_replication": FactorKind.BLOCKED,
    "permutation": FactorKind.PERMUTATION,
}
RULE = "sdy.sharding_rule"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Loop:
    """Factor in a comparable form: its kind, its size, and its positions.

    A position is (operand or result, its index, dim, place among the factors of the dim).
    """

    kind: FactorKind
    size: int
    positions: tuple


def loops_of(rule):
    """Return the factors of one of Meshtune's rules."""
    found = defaultdict(list)
    for side, tensors in (("operand", rule.operands), ("result", rule.results)):
        for slot, place in enumerate(tensors):
            for dim, factors in enumerate(place):
                real = [factor for factor in factors if rule.factors[factor].size > 1]
                for number, factor in enumerate(real):
                    found[factor].append((side, slot, dim, number))
    return [
        Loop(kind=rule.factors[factor].kind, size=rule.factors[factor].size, positions=tuple(sorted(positions)))
        for factor, positions in found.items()
    ]


def shardy_loops(equation):
    """Return the factors of the operators that a primitive is lowered to."""
    primitive, params = equation.primitive, equation.params
    arguments = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    lowered = jax.jit(lambda *operands: primitive.bind(*operands, **params), keep_unused=True).lower(*arguments)
    with make_ir_context():
        module = ir.Module.parse(lowered.as_text())
        passmanager.PassManager.parse(PASSES).run(module.operation)
        return _Joined(module).loops()


def _shape(value):
    return tuple(ir.RankedTensorType(value.type).shape)


class _Joined:
    """Factors of all operators of a module, merged where they meet on a dim of a value.

    An element is (value, dim, place among the factors of the dim).
    """

    def __init__(self, module):
        self.parent = {}
        self.kinds = defaultdict(set)
        self.sizes = {}
        functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
        self.main = functions["main"].regions[0].blocks[0]
        for function in functions.values():
            for op in function.regions[0].blocks[0].operations:
                self.add(op, functions)

    def add(self, op, functions):
        """Merge the elements that one operator's factors connect."""
        if op.name in ("func.return", "stablehlo.constant", "stablehlo.iota"):
            return
        if op.name == "func.call":
            block = functions[op.attributes["callee"].value].regions[0].blocks[0]
            inner = [*block.arguments, *list(block.operations)[-1].operands]
            for outer, value in zip([*op.operands, *op.results], inner, strict=True):
                for dim, size in enumerate(_shape(value)):
                    self.join([(outer, dim, 0), (value, dim, 0)], size)
            return
        values = [*op.operands, *op.results]
        factors, dims_of = _parsed(str(op.attributes[RULE])) if RULE in op.attributes else ({}, [[]] * len(values))
        elements = defaultdict(list)
        for value, names_of in zip(values, dims_of, strict=True):
            for dim, size in enumerate(_shape(value)):
                names = [name for name in (names_of[dim] if names_of else []) if factors[name][1] > 1]
                product = 1
                for number, name in enumerate(names):
                    elements[name].append((value, dim, number))
                    product *= factors[name][1]
                if product != size:
                    self.kinds[self.root((value, dim, 0))].add(FactorKind.BLOCKED)
                    self.sizes[value, dim, 0] = size
        for name, found in elements.items():
            self.join(found, factors[name][1])
            self.kinds[self.root(found[0])].add(factors[name][0])

    def root(self, element):
        """Return the representative of all elements merged with an element."""
        while self.parent.setdefault(element, element) != element:
            element = self.parent[element]
        return element

    def join(self, elements, size):
        """Merge elements."""
        self.sizes |= dict.fromkeys(elements, size)
        for element in elements[1:]:
            one, other = self.root(elements[0]), self.root(element)
            if one != other:
                self.parent[other] = one
                self.kinds[one] |= self.kinds.pop(other, set())

    def loops(self):
        """Return the factors of the function's arguments and results."""
        found, sizes = defaultdict(set), {}
        returned = list(self.main.operations)[-1].operands
        for side, values in (("operand", self.main.arguments), ("result", returned)):
            for slot, value in enumerate(values):
                for dim, size in enumerate(_shape(value)):
                    places = [place for place in range(8) if (value, dim, place) in self.parent] or [0]
                    for place in places if size > 1 else ():
                        root = self.root((value, dim, place))
                        found[root].add((side, slot, dim, place))
                        sizes[root] = self.sizes.get((value, dim, place), size)
        return [
            Loop(kind=self.kind(root, positions), size=sizes[root], positions=tuple(sorted(positions)))
            for root, positions in found.items()
        ]

    def kind(self, root, positions):
        """The worst that an operator says of a factor; one of an operand alone that nobody adds up is of no use."""
        kinds = self.kinds[root]
        for kind in (FactorKind.BLOCKED, FactorKind.PERMUTATION):
            if kind in kinds:
                return kind
        if any(side == "result" for side, *_ in positions):
            return FactorKind.MAP
        return FactorKind.REDUCTION if FactorKind.REDUCTION in kinds else FactorKind.BLOCKED


def _parsed(attribute):
    """Kind and size of each factor of `#sdy.op_sharding_rule<([i, jk])->([ij, k]) {i=2, ...} reduction={...}>`, and the
    names of those of each dim of operands and results.
    """
    sizes = {name: int(size) for name, size in re.findall(r"([a-z](?:_\d+)?)=(\d+)", attribute)}
    kinds = dict.fromkeys(sizes, FactorKind.MAP)
    for word, names in re.findall(r"(\w+)=\{([^}]*)\}", attribute):
        kinds |= dict.fromkeys(names.split(", "), KINDS[word]) if word in KINDS else {}
    tensors = attribute.split("{")[0]
    dims_of = [
        [re.findall(r"[a-z](?:_\d+)?", dim) for dim in dims.split(", ")] if dims else []
        for dims in re.findall(r"\[([^\]]*)\]", tensors)
    ]
    return {name: (kinds[name], size) for name, size in sizes.items()}, dims_of
