# ruff: noqa: D103, ARG001 - a function is what the primitive of its name means; all of them take the same arguments
"""Operators of a transformer's graph in numpy: the executable meaning that their rules are held to.

A meaning knows of its rule only how large a part it has been given and where that begins: it computes from arrays and
the names of their dims. Letters of einsum stand for names of dims.
"""

import string
from dataclasses import dataclass

import numpy as np

from costmodels.sharding.graph import STATE, Graph

EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of an operator that one device computes.

    Attributes:
        names: Names of the dims of operands and results.
        factors: Names of the factors of these dims, in the operator's own rule.
        sizes: Of the factors by name, as the device has them.
        whole: The same of the whole operator.
        starts: Where the device's part of a factor begins.
        top_k: Experts of a token.
    """

    names: tuple[tuple[str, ...], ...]
    factors: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    whole: dict[str, int]
    starts: dict[str, int]
    top_k: int


def product(a, a_names, b, b_names, out_names):
    """The product of two arrays that are multiplied where names agree, summed over names that the result lacks."""
    letters = {name: string.ascii_letters[at] for at, name in enumerate(dict.fromkeys((*a_names, *b_names)))}
    words = ["".join(letters[name] for name in names) for names in (a_names, b_names, out_names)]
    return np.einsum(f"{words[0]},{words[1]}->{words[2]}", a, b)


def spread(b, b_names, x_names):
    """An array with dims of size one where it lacks a name."""
    assert [name for name in x_names if name in b_names] == list(b_names)
    return b.reshape([dict(zip(b_names, b.shape, strict=True)).get(name, 1) for name in x_names])


def summed(x, x_names, names):
    """The sum over all dims but the named ones."""
    return x.sum(axis=tuple(at for at, name in enumerate(x_names) if name not in names))


def linear(part, x, *weights):
    count = len(weights)
    x_names, w_names, y_names = part.factors[0], part.factors[1 : 1 + count], part.factors[1 + count :]
    return [product(x, x_names, w, w_names[at], y_names[at]) for at, w in enumerate(weights)]


def linear_data_gradient(part, *arrays):
    count = len(arrays) // 2
    pairs = zip(arrays[:count], part.factors[:count], arrays[count:], part.factors[count : 2 * count], strict=True)
    return [sum(product(*pair, part.factors[-1]) for pair in pairs)]


def linear_weight_gradient(part, x, *given):
    w_names = part.factors[1 + len(given) :]
    return [product(x, part.factors[0], dy, part.factors[1 + at], w_names[at]) for at, dy in enumerate(given)]


def bias(part, x, b):
    return [x + spread(b, part.names[1], part.names[0])]


def bias_gradient(part, dy):
    return [summed(dy, part.names[0], part.names[1])]


def add(part, *parts):
    return [sum(parts)]


def axes_of(part):
    """The dims over which a norm goes: those of its weight."""
    return tuple(part.names[0].index(name) for name in part.names[1])


def rms_norm(part, x, w):
    axis = axes_of(part)
    return [x / np.sqrt((x * x).mean(axis, keepdims=True) + EPSILON) * spread(w, part.names[1], part.names[0])]


def layer_norm(part, x, w, b):
    axis = axes_of(part)
    (scaled,) = rms_norm(part, x - x.mean(axis, keepdims=True), w)
    return [scaled + spread(b, part.names[2], part.names[0])]


def rms_norm_gradient(part, x, w, dy):
    axis = axes_of(part)
    factor = 1 / np.sqrt((x * x).mean(axis, keepdims=True) + EPSILON)
    scaled = dy * spread(w, part.names[1], part.names[0])
    dx = factor * scaled - x * factor**3 * (scaled * x).mean(axis, keepdims=True)
    return [dx, summed(dy * x * factor, part.names[0], part.names[1])]


def layer_norm_gradient(part, x, w, dy):
    axis = axes_of(part)
    to_centred, dw = rms_norm_gradient(part, x - x.mean(axis, keepdims=True), w, dy)
    return [to_centred - to_centred.mean(axis, keepdims=True), dw, summed(dy, part.names[0], part.names[1])]


def turned(part, x, *, back=False):
    """Pairs of elements of the last dim, turned by an angle that grows with the position in dim 1."""
    positions = part.starts.get("sequence", 0) + np.arange(x.shape[1])
    half = x.shape[-1] // 2
    angles = positions[:, None] * 0.3 ** np.arange(half) * (-1 if back else 1)
    angles = angles.reshape(1, len(positions), *[1] * (x.ndim - 3), half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def rotary(part, x):
    return [turned(part, x)]


def rotary_gradient(part, dy):
    return [turned(part, dy, back=True)]


def latent_key(part, plain, shared):
    shared = np.broadcast_to(turned(part, shared)[:, :, None], (*plain.shape[:3], shared.shape[-1]))
    return [np.concatenate([plain, shared], axis=-1)]


def latent_key_gradient(part, dy):
    size = part.sizes["plain_dim"]
    return [dy[..., :size], turned(part, dy[..., size:].sum(axis=2), back=True)]


WINDOW, CHUNK = 3, 4
"""Window and chunk of the small models' masks."""


def causal(query, key):
    return query >= key


def in_window(query, key):
    return (query >= key) & (query < key + WINDOW)


def in_chunk(query, key):
    return (query >= key) & (query // CHUNK == key // CHUNK)


def everything(query, key):
    return query == query + 0 * key


def scores(part, q, k, *, sees, chosen=None):
    """Scaled scores [batch, kv head, group, query, key] and the heads of q apart."""
    batch, queries, heads, size = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], size)
    found = np.einsum("bqkgd,bskd->bkgqs", grouped, k) / np.sqrt(size)
    position = part.starts.get("queries", 0) + np.arange(queries)
    found = np.where(sees(position[:, None], np.arange(k.shape[1])), found, -np.inf)
    if chosen is not None:
        found = np.where(one_of(chosen, k.shape[1]).any(axis=2)[:, None, None], found, -np.inf)
    return found, grouped


def one_of(chosen, keys):
    """Return whether a key is that of a place among the chosen [batch, query, place, key]."""
    return chosen[..., None] == np.arange(keys)


def attention(part, q, k, v, *others, sees=causal):
    sink, chosen = named(part, others)
    found, grouped = scores(part, q, k, sees=sees, chosen=chosen)
    total = np.exp(found).sum(axis=-1)
    if sink is not None:  # a logit to which no value belongs
        total = total + np.exp(sink).reshape(grouped.shape[2:4])[:, :, None]
    normaliser = np.log(total)
    context = np.einsum("bkgqs,bskv->bqkgv", np.exp(found - normaliser[..., None]), v)
    return [context.reshape(*q.shape[:3], v.shape[-1]), np.moveaxis(normaliser, -1, 1).reshape(q.shape[:3])]


def named(part, others):
    """The sink of each head and the chosen keys of each query among the further operands of attention."""
    by_dims = {part.names[3 + at][-1]: array for at, array in enumerate(others)}
    return by_dims.get("heads"), by_dims.get("chosen")


def attention_gradient(part, q, k, v, *rest, sees=causal):
    *others, context, normaliser, dy = rest
    sink, chosen = named(part, others)
    found, grouped = scores(part, q, k, sees=sees, chosen=chosen)
    apart = (*q.shape[:2], *grouped.shape[2:4])
    normaliser = np.moveaxis(normaliser.reshape(apart), 1, -1)
    weights = np.exp(found - normaliser[..., None])
    dy, context = dy.reshape(*apart, -1), context.reshape(*apart, -1)
    inner = np.moveaxis((dy * context).sum(axis=-1), 1, -1)[..., None]
    to_scores = weights * (np.einsum("bqkgv,bskv->bkgqs", dy, v) - inner) / np.sqrt(q.shape[-1])
    found = [
        np.einsum("bkgqs,bskd->bqkgd", to_scores, k).reshape(q.shape),
        np.einsum("bkgqs,bqkgd->bskd", to_scores, grouped),
        np.einsum("bkgqs,bqkgv->bskv", weights, dy),
    ]
    if sink is not None:
        share = np.exp(sink.reshape(grouped.shape[2:4])[:, :, None] - normaliser)
        found.append(-(share * inner[..., 0]).sum(axis=(0, 3)).reshape(sink.shape))
    if chosen is not None:  # what attention gives the chosen keys, for the indexer to learn
        found.append(np.einsum("bkgqs,bqcs->bqc", weights, one_of(chosen, k.shape[1])))
    return found


def index_scores(part, queries, keys, shares):
    """Scores of the indexer [batch, query, key], and the products of its heads."""
    inner = np.einsum("bqhd,bsd->bqhs", queries, keys)
    found = (shares[..., None] * np.maximum(inner, 0)).sum(axis=2)
    position = part.starts.get("queries", 0) + np.arange(queries.shape[1])
    return np.where(position[:, None] >= np.arange(keys.shape[1]), found, -np.inf), inner


def index_choice(part, queries, keys, shares):
    found, _ = index_scores(part, queries, keys, shares)
    return [np.sort(np.argsort(-found, axis=-1, kind="stable")[..., : part.sizes["chosen"]], axis=-1)]


def index_choice_gradient(part, queries, keys, shares, target):
    """The slope of the divergence of the indexer's shares of the chosen keys from attention's."""
    found, inner = index_scores(part, queries, keys, shares)
    (chosen,) = index_choice(part, queries, keys, shares)
    of_chosen = np.take_along_axis(found, chosen, axis=-1)
    own = np.exp(of_chosen) / np.exp(of_chosen).sum(axis=-1, keepdims=True)
    to_scores = np.einsum("bqc,bqcs->bqs", own - target, one_of(chosen, keys.shape[1]))
    to_inner = to_scores[:, :, None] * shares[..., None] * (inner > 0)
    return [
        np.einsum("bqhs,bsd->bqhd", to_inner, keys),
        np.einsum("bqhs,bqhd->bsd", to_inner, queries),
        np.einsum("bqs,bqhs->bqh", to_scores, np.maximum(inner, 0)),
    ]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def activation(part, x):
    return [x * sigmoid(x)]


def activation_gradient(part, x, dy):
    return [dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))]


def gated_activation(part, x):
    return [activation(part, x[..., 0, :])[0] * x[..., 1, :]]


def gated_activation_gradient(part, x, dy):
    gate, value = x[..., 0, :], x[..., 1, :]
    return [np.stack([activation_gradient(part, gate, dy * value)[0], dy * activation(part, gate)[0]], axis=-2)]


def embedding(part, tokens, table):
    rows = tokens - part.starts.get("vocabulary", 0)
    mine = (rows >= 0) & (rows < len(table))
    return [np.where(mine[..., None], table[np.where(mine, rows, 0)], 0.0)]


def embedding_gradient(part, tokens, dy):
    rows = tokens - part.starts.get("vocabulary", 0)
    mine = (rows >= 0) & (rows < part.sizes["vocabulary"])
    table = np.zeros((part.sizes["vocabulary"], dy.shape[-1]))
    np.add.at(table, rows[mine], dy[mine])
    return [table]


def positions(part, x, table):
    return [x + table[: x.shape[1]]]


def positions_gradient(part, dy):
    table = np.zeros((part.sizes.get("positions", dy.shape[1]), dy.shape[-1]))
    table[: dy.shape[1]] = dy.sum(axis=0)
    return [table]


def maximum(part, logits):
    return [logits.max(axis=-1)]


def exponential_sum(part, logits, largest):
    return [np.exp(logits - largest[..., None]).sum(axis=-1)]


def of_labels(part, labels):
    """One where the label is, over the part of the vocabulary."""
    return (labels[..., None] - part.starts.get("vocabulary", 0) == np.arange(part.sizes["vocabulary"])).astype(float)


def label_logit(part, logits, labels):
    return [(logits * of_labels(part, labels)).sum(axis=-1)]


def mean_loss(part, largest, total, chosen):
    count = part.whole["batch"] * part.whole["sequence"]
    return [np.array([(np.log(total) + largest - chosen).sum() / count])]


def cross_entropy_gradient(part, logits, largest, total, labels):
    count = part.whole["batch"] * part.whole["sequence"]
    return [(np.exp(logits - largest[..., None]) / total[..., None] - of_labels(part, labels)) / count]


def chosen_shares(part, logits):
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return shares, shares >= np.sort(shares, axis=-1)[..., -part.top_k][..., None]


def routing(part, logits):
    shares, chosen = chosen_shares(part, logits)
    return [(shares * chosen)[..., : part.sizes["experts"]]]  # the others compute nothing


def routing_gradient(part, logits, dy):
    shares, chosen = chosen_shares(part, logits)
    dy = np.pad(dy, [(0, 0), (0, 0), (0, logits.shape[-1] - dy.shape[-1])])
    return [shares * (dy * chosen - (shares * dy * chosen).sum(axis=-1, keepdims=True))]


def placed(part, weights):
    """Return whether a token fills a slot [batch, chunk, token, expert, slot], and the weights by chunk."""
    weights = weights.reshape(weights.shape[0], part.sizes["chunks"], part.sizes["chunk_tokens"], -1)
    chosen = weights > 0
    slot = np.cumsum(chosen, axis=2) - 1
    return (chosen[..., None] & (slot[..., None] == np.arange(part.sizes["chunk_slots"]))).astype(float), weights


def by_chunk(part, x):
    return x.reshape(x.shape[0], part.sizes["chunks"], part.sizes["chunk_tokens"], x.shape[-1])


def slots_by_chunk(part, y):
    return y.reshape(*y.shape[:2], part.sizes["chunks"], part.sizes["chunk_slots"], y.shape[-1])


def dispatch(part, x, weights):
    place, _ = placed(part, weights)
    slots = np.einsum("bctes,bcth->ebcsh", place, by_chunk(part, x))
    return [slots.reshape(*slots.shape[:2], -1, slots.shape[-1])]


def dispatch_gradient(part, dy, weights):
    place, _ = placed(part, weights)
    to_x = np.einsum("bctes,ebcsh->bcth", place, slots_by_chunk(part, dy))
    return [to_x.reshape(to_x.shape[0], -1, to_x.shape[-1])]


def combine(part, y, weights):
    place, weights = placed(part, weights)
    out = np.einsum("bctes,bcte,ebcsh->bcth", place, weights, slots_by_chunk(part, y))
    return [out.reshape(out.shape[0], -1, out.shape[-1])]


def combine_gradient(part, dy, y, weights):
    place, by_weight = placed(part, weights)
    slots = np.einsum("bctes,bcte,bcth->ebcsh", place, by_weight, by_chunk(part, dy))
    to_weights = np.einsum("bctes,ebcsh,bcth->bcte", place, slots_by_chunk(part, y), by_chunk(part, dy))
    return [slots.reshape(y.shape), to_weights.reshape(weights.shape)]


def sigmoid_scale(part, x, gates):
    return [x * sigmoid(gates).reshape(*gates.shape, *[1] * (x.ndim - gates.ndim))]


def sigmoid_scale_gradient(part, x, gates, dy):
    share = sigmoid(gates).reshape(*gates.shape, *[1] * (x.ndim - gates.ndim))
    to_gates = (dy * x * share * (1 - share)).reshape(*gates.shape, -1).sum(axis=-1)
    return [dy * share, to_gates]


def masked(meaning, sees):
    return lambda part, *arrays: meaning(part, *arrays, sees=sees)


def silu(x):
    return x * sigmoid(x)


def convolution(part, x, weight):
    """Two taps along the sequence for every channel, or three and a bias."""
    weight = weight.reshape(weight.shape[0], x.shape[-1], -1)
    taps = {2: 2, 4: 3}[weight.shape[-1]]
    padded = np.concatenate([np.zeros_like(x[:, : taps - 1]), x], axis=1)
    found = sum(padded[:, taps - 1 - tap : padded.shape[1] - tap] * weight[..., tap] for tap in range(taps))
    return [found + weight[..., taps] if taps == 3 else found]


def join(part, hidden, embedded):
    return [np.stack([hidden, embedded], axis=2)]


def gate(part, x, gates):
    return [x * silu(gates)]


def gated_norm(part, x, gates, weight):
    # one weight for each element, or one of a value head that all of them share
    apart = x if weight.ndim == 2 else x.reshape(*x.shape[:3], -1, len(weight))
    scaled = apart / np.sqrt((apart * apart).mean(axis=-1, keepdims=True) + EPSILON) * weight
    return gate(part, scaled.reshape(x.shape), gates)


def scanned(part, steps, state, step):
    """Results of every step along the sequence, and the states that a kernel keeps, which nothing here reads."""
    found = []
    for at in range(steps):
        state, y = step(state, at)
        found.append(y)
    kept = np.zeros((found[0].shape[0], found[0].shape[1], part.sizes["kept"]))
    return [np.stack(found, axis=1), kept]


def gated_delta_net_scan(part, mixed, steps, weight):
    """Two value heads of two elements for a key head: a decaying state that is corrected towards each value."""
    batch, length, heads, _ = mixed.shape
    q, k, v = mixed[..., None, :2], mixed[..., None, 2:4], mixed[..., 4:].reshape(batch, length, heads, 2, 2)
    learning, decay = (
        sigmoid(steps[..., :2]),
        np.exp(-np.exp(weight[:, :2]) * np.log1p(np.exp(steps[..., 2:] + weight[:, 2:]))),
    )

    def step(state, at):
        state = state * decay[:, at, ..., None, None]
        error = v[:, at] - (k[:, at, ..., None] * state).sum(axis=-2)
        state = state + learning[:, at, ..., None, None] * k[:, at, ..., None] * error[..., None, :]
        return state, (q[:, at, ..., None] * state).sum(axis=-2).reshape(batch, heads, 4)

    return scanned(part, length, np.zeros((batch, heads, 2, 2, 2)), step)


def mamba2_scan(part, mixed, steps, weight):
    """Two heads of two elements for a group, which shares inputs and outputs of a state of two elements."""
    batch, length, heads, _ = mixed.shape
    x, b, c = mixed[..., :4].reshape(batch, length, heads, 2, 2), mixed[..., 4:6], mixed[..., 6:]
    size = np.log1p(np.exp(steps + weight[:, :2]))
    decay, skip = np.exp(-np.exp(weight[:, 2:4]) * size), weight[:, 4:]

    def step(state, at):
        state = state * decay[:, at, ..., None, None]
        state = state + (size[:, at, ..., None] * x[:, at])[..., None] * b[:, at, :, None, None]
        y = (state * c[:, at, :, None, None]).sum(axis=-1) + skip[..., None] * x[:, at]
        return state, y.reshape(batch, heads, 4)

    return scanned(part, length, np.zeros((batch, heads, 2, 2, 2)), step)


def mamba1_scan(part, mixed, steps, states, weight):
    """A state of two elements for every channel, with a decay for each of them."""
    x, b, c = mixed[..., 0], states[..., :2], states[..., 2:]
    size = np.log1p(np.exp(steps + weight[:, 0]))
    decay, skip = np.exp(-np.exp(weight[:, 2:]) * size[..., None]), weight[:, 1]

    def step(state, at):
        state = state * decay[:, at] + (size[:, at] * x[:, at])[..., None] * b[:, at, None]
        return state, ((state * c[:, at, None]).sum(axis=-1) + skip * x[:, at])[..., None]

    return scanned(part, x.shape[1], np.zeros((len(x), x.shape[2], 2)), step)


def lightning_attention_scan(part, mixed):
    """Heads of four elements, whose state decays by a tenth with every token."""
    q, k, v = mixed[..., :4], mixed[..., 4:8], mixed[..., 8:]

    def step(state, at):
        state = 0.9 * state + k[:, at, ..., None] * v[:, at, ..., None, :]
        return state, (q[:, at, ..., None] * state).sum(axis=-2)

    return scanned(part, mixed.shape[1], np.zeros((len(mixed), mixed.shape[2], 4, 4)), step)


def slope_of(meaning):
    """The gradient of a kernel, element by element: the imaginary part of a result is the slope (Squire and Trapp 1998,
    SIAM Review 40, 110).
    """

    def gradient(part, *arrays):
        operands, dy = arrays[: len(part.names) - len(arrays)], arrays[-1]
        found = []
        for at, operand in enumerate(operands):
            slopes = np.zeros(operand.shape)
            for place in np.ndindex(operand.shape):
                moved = operand.astype(complex)
                moved[place] += 1e-30j
                result = meaning(part, *operands[:at], moved, *operands[at + 1 :])[0]
                slopes[place] = (result.imag * dy).sum() / 1e-30
            found.append(slopes)
        return found

    return gradient


def adam(part, parameter, gradient, first, second):
    first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
    return [parameter - 0.01 * first / (np.sqrt(second) + 1e-8), first, second]


def sgd(part, parameter, gradient, momentum):
    momentum = 0.9 * momentum + gradient
    return [parameter - 0.01 * momentum, momentum]


MEANINGS = {
    **{
        f"{kind}{suffix}": meaning
        for kind in ("matmul", "batch_matmul")
        for suffix, meaning in (
            ("", linear),
            ("_data_gradient", linear_data_gradient),
            ("_weight_gradient", linear_weight_gradient),
        )
    },
    **{
        meaning.__name__: meaning
        for meaning in (
            *(bias, bias_gradient, add, rms_norm, rms_norm_gradient, layer_norm, layer_norm_gradient),
            *(rotary, rotary_gradient, latent_key, latent_key_gradient, attention, attention_gradient),
            *(activation, activation_gradient, index_choice, index_choice_gradient),
            *(gated_activation, gated_activation_gradient, embedding, embedding_gradient),
            *(positions, positions_gradient, maximum, exponential_sum, label_logit, mean_loss),
            *(cross_entropy_gradient, routing, routing_gradient, dispatch, dispatch_gradient),
            *(combine, combine_gradient, sigmoid_scale, sigmoid_scale_gradient, adam, sgd),
        )
    },
    **{
        f"{name}{suffix}": masked(meaning, sees)
        for name, sees in (
            *(("full_attention", everything), ("window_attention_with_sink", in_window)),
            *(("chunk_attention", in_chunk), ("sparse_attention", causal)),
        )
        for suffix, meaning in (("", attention), ("_gradient", attention_gradient))
    },
    **{
        f"{meaning.__name__}{suffix}": own
        for meaning in (
            *(convolution, gate, gated_norm, gated_delta_net_scan, mamba2_scan, mamba1_scan),
            *(lightning_attention_scan, join),
        )
        for suffix, own in (("", meaning), ("_gradient", slope_of(meaning)))
    },
}


def run_op(graph: Graph, op, arrays, *, top_k, cut=None, of=1, at=0):
    """The results of an operator, or of one part: factor `cut` is cut into `of` parts, of which this is number `at`."""
    factors = op.rule.factors
    whole = {factor.name: factor.size for factor in factors}
    sizes, starts = dict(whole), {}
    if cut is not None:
        name = factors[cut].name
        sizes[name] = whole[name] // of
        starts[name] = at * sizes[name]
    part = Part(
        names=tuple(graph.tensors[tensor].dim_names for tensor in (*op.operands, *op.results)),
        factors=tuple(
            tuple(" ".join(factors[factor].name for factor in dim) for dim in place)
            for place in (*op.rule.operands, *op.rule.results)
        ),
        sizes=sizes,
        whole=whole,
        starts=starts,
        top_k=top_k,
    )
    return MEANINGS[op.primitive](part, *arrays)


def first_values(graph, rng):
    """Draw the values of the sources of a graph: small random parameters, moments and token numbers."""
    found = {}
    for op in graph.ops:
        if op.is_source:
            (number,) = op.results
            tensor = graph.tensors[number]
            if op.primitive == STATE:
                found[number] = 0.5 * rng.standard_normal(tensor.shape)
                if tensor.name.endswith("second_moment"):
                    found[number] **= 2
            else:
                found[number] = rng.integers(0, 12, tensor.shape)
    return found


def run_graph(graph, values, *, top_k, until=None):
    """Runs all operators, or those before `until`; all tensors by their numbers."""
    values = dict(values)
    for op in graph.ops[:until]:
        if not op.is_source:
            results = run_op(graph, op, [values[tensor] for tensor in op.operands], top_k=top_k)
            values.update(zip(op.results, results, strict=True))
    return values
