"""Graphs of small training steps, written by hand."""

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, STATE, GraphBuilder, TensorKind

PARAMETER, ACTIVATION, GRADIENT = TensorKind.PARAMETER, TensorKind.ACTIVATION, TensorKind.GRADIENT


def mlp(batch=4096, hidden=4096, ffn=16384, num_layers=1):
    """Build layers of two matrix products each, forward and backward, with one moment of the optimizer."""
    graph = GraphBuilder(name="mlp")
    sizes = {"batch": batch, "hidden": hidden, "ffn": ffn}
    product = {"flop": 2.0 * batch * hidden * ffn, "precision": "bf16"}

    def array(name, dims, kind):
        return graph.tensor(name, [sizes[dim] for dim in dims.split()], 2, kind, dims.split())

    def state(name, dims, kind=PARAMETER, element_bytes=2):
        return graph.source(STATE, name, [sizes[dim] for dim in dims.split()], element_bytes, kind, dims.split())

    def op(name, operands, result, pattern, **details):
        graph.op(name, name.rpartition(".")[2], operands, [result], rule_of(pattern, sizes), **details)
        return result

    x = graph.source(INPUT, "x", (batch, hidden), 2, TensorKind.DATA, ("batch", "hidden"))
    layers = []
    for layer in range(num_layers):
        first, second = state(f"{layer}.w1", "hidden ffn"), state(f"{layer}.w2", "ffn hidden")
        up = array(f"{layer}.y", "batch ffn", ACTIVATION)
        op(f"{layer}.up", (x, first), up, "batch hidden, hidden ffn -> batch ffn", **product)
        active = array(f"{layer}.z", "batch ffn", ACTIVATION)
        op(f"{layer}.activation", (up,), active, "batch ffn -> batch ffn")
        down = array(f"{layer}.o", "batch hidden", ACTIVATION)
        op(f"{layer}.down", (active, second), down, "batch ffn, ffn hidden -> batch hidden", **product)
        layers.append((x, first, second, up, active))
        x = down
    gradient = op("loss", (x,), array("loss.g", "batch hidden", GRADIENT), "batch hidden -> batch hidden")
    graph.begin_backward()
    for layer, (x, first, second, up, active) in reversed(list(enumerate(layers))):
        of_active = array(f"{layer}.z.g", "batch ffn", GRADIENT)
        op(f"{layer}.down.data", (gradient, second), of_active, "batch hidden, ffn hidden -> batch ffn", **product)
        of_second = array(f"{layer}.w2.g", "ffn hidden", GRADIENT)
        op(f"{layer}.down.weight", (active, gradient), of_second, "batch ffn, batch hidden -> ffn hidden", **product)
        of_up = array(f"{layer}.y.g", "batch ffn", GRADIENT)
        op(f"{layer}.activation.data", (of_active, up), of_up, "batch ffn, batch ffn -> batch ffn")
        of_x = array(f"{layer}.x.g", "batch hidden", GRADIENT)
        op(f"{layer}.up.data", (of_up, first), of_x, "batch ffn, hidden ffn -> batch hidden", **product)
        of_first = array(f"{layer}.w1.g", "hidden ffn", GRADIENT)
        op(f"{layer}.up.weight", (x, of_up), of_first, "batch hidden, batch ffn -> hidden ffn", **product)
        for name, weight, of_weight, dims in (
            (f"{layer}.w1", first, of_first, "hidden ffn"),
            (f"{layer}.w2", second, of_second, "ffn hidden"),
        ):
            moment = state(f"{name}.m", dims, TensorKind.OPTIMIZER, 4)
            new = array(f"{name}.new", dims, PARAMETER)
            new_moment = graph.tensor(
                f"{name}.m.new", [sizes[dim] for dim in dims.split()], 4, TensorKind.OPTIMIZER, dims.split()
            )
            rule = rule_of(f"{dims}, {dims}, {dims} -> {dims}, {dims}", sizes)
            graph.op(f"{name}.update", "update", (weight, of_weight, moment), (new, new_moment), rule)
            graph.keep(weight, new)
            graph.keep(moment, new_moment)
        gradient = of_x
    return graph.done()
