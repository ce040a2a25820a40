"""Graph of the simplified attention in figure 5 of TOAST, with one layer or several."""

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, Graph, GraphBuilder, TensorKind

SIZES = {"s": 64, "t": 64, "d": 32, "h": 16, "v": 16}


def attention(num_layers: int = 1, *, masks: str = "none", sizes: dict[str, int] | None = None) -> Graph:
    """Build layers of figure 5a; between two layers the result is projected back to the width of x.

    Args:
        num_layers: Number of attention layers.
        masks: Constant that multiplies the scores: `shared` by all layers, `own` of each layer, or `none`.
        sizes: Sizes of the dims: s and t of the sequence, d of the model, h of keys, v of values.
    """
    graph = GraphBuilder(name="attention")
    sizes = sizes or SIZES

    def source(primitive, name, dims):
        return graph.source(primitive, name, [sizes[dim] for dim in dims.split()], 2, TensorKind.PARAMETER)

    def op(name, operands, dims, pattern, **details):
        result = graph.tensor(name, [sizes[dim] for dim in dims.split()], 2, TensorKind.ACTIVATION)
        graph.op(f"{name}.op", name.rpartition(".")[2], operands, [result], rule_of(pattern, sizes), **details)
        return result

    def product(name, operands, dims, pattern):
        return op(name, operands, dims, pattern, flop=1e12, precision="bf16")

    x = source(INPUT, "x", "s d")
    shared = source(CONSTANT, "mask", "s t") if masks == "shared" else None
    for layer in range(num_layers):
        wq, wk, wv = (
            source(STATE, f"{layer}.{name}", f"d {to}") for name, to in (("wq", "h"), ("wk", "h"), ("wv", "v"))
        )
        k = product(f"{layer}.k", (x, wk), "s h", "s d, d h -> s h")
        v = product(f"{layer}.v", (x, wv), "s v", "s d, d v -> s v")
        q = product(f"{layer}.q", (x, wq), "s h", "s d, d h -> s h")
        qt = op(f"{layer}.qt", (q,), "h t", "t h -> h t")
        a = product(f"{layer}.a", (k, qt), "s t", "s h, h t -> s t")
        if masks != "none":
            mask = source(CONSTANT, f"{layer}.mask", "s t") if shared is None else shared
            a = op(f"{layer}.masked", (a, mask), "s t", "s t, s t -> s t")
        b = op(f"{layer}.b", (a,), "t", "s t -> t")
        c = op(f"{layer}.c", (b,), "s t", "t -> s t")
        d = op(f"{layer}.d", (a, c), "s t", "s t, s t -> s t")
        z = product(f"{layer}.z", (d, v), "s v", "s t, t v -> s v")
        if layer + 1 < num_layers:
            wo = source(STATE, f"{layer}.wo", "v d")
            x = product(f"{layer}.o", (z, wo), "s d", "s v, v d -> s d")
        else:
            op("return", (z,), "s v", "s v -> s v")
    return graph.done()
