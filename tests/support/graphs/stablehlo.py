"""Modules of StableHLO, run by XLA itself, and programs that are lowered to them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.backend import get_backend
from jaxlib import xla_client


def run_module(text, *arguments):
    """Return the results of a module's main function, compiled by XLA for the CPU."""
    backend = get_backend("cpu")
    devices = xla_client.DeviceList((backend.devices()[0],))
    compiled = backend.compile_and_load(text, devices, xla_client.CompileOptions())
    buffers = [jax.device_put(np.asarray(each)) for each in arguments]
    results = compiled.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [np.asarray(each) for (each,) in results]


def _scanned(x, w):
    """Scan over stacked weights, with a stacked result, and its gradient, which goes through stacks from their end."""

    def layer(x, own):
        y = jnp.tanh(x @ own)
        return y, y.sum(0)

    def loss(w):
        y, sums = lax.scan(layer, x, w)
        return (y * y).sum() + (sums * sums).sum()

    return jax.value_and_grad(loss)(w)


def _counted(x):
    """Loop that uses its counter, beside a stack that it reads twice and one that it writes at another place."""
    begin = jnp.zeros((4, 3))

    def step(i, carried):
        total, kept = carried
        return total + x[i] * i + x[3 - i], lax.dynamic_update_index_in_dim(kept, x[i], (i + 1) % 4, 0)

    return lax.fori_loop(0, 4, step, (jnp.zeros(3), begin))


def _nested(x):
    """Scan inside of a scan."""

    def outer(total, row):
        def inner(total, each):
            return total * 0.5 + each, total

        return lax.scan(inner, total, row)

    return lax.scan(outer, jnp.float32(1), x)


def _convolved(x, w):
    """Convolution with stride, dilation and groups, and its gradients."""

    def loss(x, w):
        y = lax.conv_general_dilated(x, w, (2, 1), [(1, 2), (0, 1)], rhs_dilation=(1, 2), feature_group_count=2)
        return (y * jnp.cos(y)).sum()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def _pooled(x):
    """Greatest values of windows with their gradient, and sums of windows."""

    def loss(x):
        greatest = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2), (1, 2, 2), "SAME")
        return (greatest * greatest).sum()

    return jax.grad(loss)(x), lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 1), "VALID", (1, 2, 1), (1, 1, 2))


def _indexed(x, i):
    """Gathers and scatters, with places outside of the array among their indices."""
    rows = x[i]
    picked = jnp.take_along_axis(x, i[:, None] % x.shape[1], axis=1)
    filled = x.at[i].get(mode="fill", fill_value=7.0)
    added = x.at[i].add(rows * 2.0, mode="drop")
    return rows, picked, filled, added, x.at[i, 0].set(5.0), x.at[i].max(0.1), x.at[:, i].mul(3.0), x.at[i].min(-1.0)


def _batched_index(x, i):
    """Gathers and scatters of which some dims are batches."""
    rows = jax.vmap(lambda one, at: one[at])(x, i)
    return rows, jax.vmap(lambda one, at, own: one.at[at].add(own))(x, i, rows)


def _sorted(x, k):
    """Sorts by one key and by two, with their permutations, in both orders."""
    return (
        jnp.sort(x, axis=0),
        jnp.argsort(x, axis=1, descending=True),
        lax.sort((k, x), dimension=1, num_keys=2),
        lax.sort((k, x), dimension=1, num_keys=1),
        lax.top_k(x, 2),
        jnp.median(x),
    )


def _folded(x, k):
    """Reductions of every kind, along with a greatest value's place, and cumulative ones."""
    return (
        (x.sum(1), x.prod(0), x.max(), x.min(1), (x > 0).any(1), (x > 0).all(0), k.max(1), k.min()),
        (jnp.argmax(x, 1), jnp.argmin(x), jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(k, 1, reverse=True)),
        (
            jnp.bitwise_or.reduce(k, axis=1),
            jnp.logaddexp.reduce(x, axis=0),
            lax.reduce(x, np.float32(3), lax.add, (0,)),
        ),
    )


def _shaped(x, i):
    """Operators that move elements, some of them to or from a place that a value gives."""
    return (
        lax.pad(x, jnp.float32(9), [(1, -1, 0), (0, 2, 1)]),
        lax.rev(x, (0,)),
        lax.dynamic_slice(x, (i[0], 1), (2, 2)),
        lax.dynamic_update_slice(x, x[:2, :2], (i[1], i[0])),
        jnp.concatenate([x, x[::2]], axis=0)[1:-1].T.reshape(-1, 2),
        jnp.broadcast_to(x[:, None, :1], (x.shape[0], 3, 5)) + jnp.arange(5.0),
        lax.bitcast_convert_type(x, jnp.int32) & 255,
        x.astype(jnp.bfloat16) * jnp.array([1.5, -2.0, jnp.inf, jnp.nan, 0.25], jnp.bfloat16),
        lax.reduce_precision(x, 5, 3),
    )


def _elementwise(x, k):
    """Elementwise operators of floats and of integers."""
    y = jnp.abs(x) + 0.5
    of_floats = [
        *(f(x) for f in (jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp, jnp.expm1, jnp.floor, jnp.ceil, jnp.round)),
        *(f(x) for f in (jnp.sign, jax.nn.sigmoid, jax.nn.gelu, jnp.cbrt, jnp.isfinite, jnp.sinh, jnp.cosh)),
        *(f(y) for f in (jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, jnp.square, lax.lgamma, lax.digamma, jnp.arcsinh)),
        *(f(x * 0.1) for f in (lax.erf, lax.erf_inv, lax.erfc, jnp.arctanh, jnp.arcsin, jnp.arccos, jnp.arctan)),
        jnp.power(y, x), jnp.arctan2(x, y), jnp.nextafter(x, y), jnp.clip(x, -0.5, 0.5), jnp.remainder(x, y),
    ]  # fmt: skip
    of_integers = [k // 3, k % 3, k << 1, k >> 1, lax.shift_right_logical(k, 1), ~k, k ^ 5, lax.population_count(k)]
    of_both = [lax.clz(k), k.astype(jnp.float32) / 2, k > 1, jnp.where(k > 1, x, y), lax.select_n(k > 0, x, y)]
    return of_floats, of_integers, of_both


def _decided(x, i):
    """Branches, and a loop whose end a value decides."""
    chosen = lax.switch(i[0], [lambda x: x, lambda x: x * 2, jnp.sin], x)
    kept = lax.cond(i[1] > 1, lambda x: x + 1, lambda x: x - 1, x)
    return (
        chosen,
        kept,
        lax.while_loop(lambda c: c[1] < 40.0, lambda c: (c[0] * 1.1, c[1] + jnp.abs(c[0]).sum()), (x, 0.0)),
    )


def _drawn(key, x):
    """Random numbers of a key, and a dropout of them."""
    return jax.random.normal(key, (3, 2)), jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def _complex(x):
    """Complex numbers and transforms."""
    z = lax.complex(x, x * 2) * jnp.complex64(1 - 2j)
    return jnp.fft.rfft(x), jnp.fft.ifft(z), jnp.abs(z), z.real + z.imag, jnp.conj(z)


def _products(x, y):
    """Products of several kinds."""
    return (
        jnp.einsum("bik,bkj->bij", x, y),
        jnp.einsum("bik,ckj->bcij", x, y),
        jnp.tensordot(x, y, axes=([0, 2], [0, 1])),
        lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.bfloat16),
    )


def _calls(x, w):
    """Functions that JAX calls by name, one of them twice, some with their own gradients."""
    return jax.grad(
        lambda w: jax.checkpoint(lambda w: jax.nn.silu(jax.nn.softmax(x @ w)).sum())(w) + jax.nn.relu(w).sum()
    )(w)


_RANDOM = np.random.default_rng(7)


def _floats(*shape):
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _integers(limit, *shape):
    return _RANDOM.integers(0, limit, shape).astype(np.int32)


PROGRAMS = {
    function.__name__.removeprefix("_"): (function, arguments)
    for function, *arguments in (
        (_scanned, _floats(2, 4), _floats(3, 4, 4)),
        (_counted, _floats(4, 3)),
        (_nested, _floats(3, 4)),
        (_convolved, _floats(2, 4, 9, 8), _floats(6, 2, 3, 2)),
        (_pooled, _floats(2, 7, 6)),
        (_indexed, _floats(5, 5), np.array([0, 3, 9, -7, 3], np.int32)),
        (_batched_index, _floats(3, 5, 2), _integers(5, 3, 4)),
        (_sorted, _floats(4, 6), _integers(3, 4, 6)),
        (_folded, _floats(4, 5), _integers(9, 4, 5)),
        (_shaped, _floats(4, 5), np.array([1, 3], np.int32)),
        (_elementwise, _floats(4, 5), _integers(9, 4, 5)),
        (_decided, _floats(4), np.array([2, 1], np.int32)),
        (_drawn, np.array([1, 2], np.uint32), _floats(5, 4)),
        (_complex, _floats(3, 8)),
        (_products, _floats(3, 4, 5), _floats(3, 5, 5)),
        (_calls, _floats(3, 4), _floats(4, 4)),
    )
}
"""Programs with their arguments by name."""


def _module(signature, body):
    return f"module @step {{\nfunc.func @main({signature} {{\n{body}\n}}\n}}\n"


_OF_TWO = "%a: tensor<f32>, %b: tensor<f32>"

MODULES = {
    "branch outside": (
        _module(
            "%n: tensor<i32>, %x: tensor<2xf32>) -> tensor<2xf32>",
            """%0 = "stablehlo.case"(%n) ({ stablehlo.return %x : tensor<2xf32> },
            { %1 = stablehlo.negate %x : tensor<2xf32> stablehlo.return %1 : tensor<2xf32> })
            : (tensor<i32>) -> tensor<2xf32>
            return %0 : tensor<2xf32>""",
        ),
        (np.int32(-1), _floats(2)),
    ),
    "either": (
        _module(
            "%p: tensor<i1>, %x: tensor<2xf32>) -> tensor<2xf32>",
            """%0 = "stablehlo.if"(%p) ({ %1 = stablehlo.abs %x : tensor<2xf32> stablehlo.return %1 : tensor<2xf32> },
            { stablehlo.return %x : tensor<2xf32> }) : (tensor<i1>) -> tensor<2xf32>
            return %0 : tensor<2xf32>""",
        ),
        (np.bool_(True), np.array([-1, 2], np.float32)),
    ),
    "sum from two": (
        _module(
            "%x: tensor<3x2xf32>) -> tensor<2xf32>",
            """%two = stablehlo.constant dense<2.0> : tensor<f32>
            %0 = stablehlo.reduce(%x init: %two) applies stablehlo.add across dimensions = [0]
            : (tensor<3x2xf32>, tensor<f32>) -> tensor<2xf32>
            return %0 : tensor<2xf32>""",
        ),
        (_floats(3, 2),),
    ),
    "own reduction": (
        _module(
            "%x: tensor<3x2xf32>) -> tensor<2xf32>",
            f"""%zero = stablehlo.constant dense<0.0> : tensor<f32>
            %0 = stablehlo.reduce(%x init: %zero) across dimensions = [0]
            : (tensor<3x2xf32>, tensor<f32>) -> tensor<2xf32>
            reducer({_OF_TWO.replace(", ", ") (").replace(") (", ", ")}) {{
              %1 = stablehlo.multiply %b, %b : tensor<f32>
              %2 = stablehlo.add %a, %b : tensor<f32>
              %3 = stablehlo.maximum %a, %b : tensor<f32>
              stablehlo.return %3 : tensor<f32>
            }}
            return %0 : tensor<2xf32>""",
        ),
        (_floats(3, 2),),
    ),
    "descending": (
        _module(
            "%x: tensor<8xf32>, %k: tensor<8xi32>) -> (tensor<8xf32>, tensor<8xi32>)",
            f"""%0:2 = "stablehlo.sort"(%x, %k) ({{
            ^bb0({_OF_TWO}, %c: tensor<i32>, %d: tensor<i32>):
              %1 = stablehlo.compare GT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
              stablehlo.return %1 : tensor<i1>
            }}) {{dimension = 0 : i64, is_stable = true}}
            : (tensor<8xf32>, tensor<8xi32>) -> (tensor<8xf32>, tensor<8xi32>)
            return %0#0, %0#1 : tensor<8xf32>, tensor<8xi32>""".replace("GT, %a, %b, TOTALORDER", "GT, %a, %b, FLOAT"),
        ),
        (np.array([1, 3, 1, 2, 3, -1, 2, 1], np.float32), np.arange(8, dtype=np.int32)),
    ),
    "triangle": (
        _module(
            "%a: tensor<3x3xf32>, %b: tensor<3x2xf32>) -> (tensor<3x3xf32>, tensor<3x2xf32>)",
            """%0 = stablehlo.cholesky %a, lower = true : tensor<3x3xf32>
            %1 = "stablehlo.triangular_solve"(%a, %b) {left_side = true, lower = true, unit_diagonal = false,
            transpose_a = #stablehlo<transpose TRANSPOSE>} : (tensor<3x3xf32>, tensor<3x2xf32>) -> tensor<3x2xf32>
            %2 = stablehlo.iota dim = 0 : tensor<3x3xi32>
            %3 = stablehlo.iota dim = 1 : tensor<3x3xi32>
            %4 = stablehlo.compare GE, %2, %3 : (tensor<3x3xi32>, tensor<3x3xi32>) -> tensor<3x3xi1>
            %5 = stablehlo.subtract %0, %0 : tensor<3x3xf32>
            %6 = stablehlo.select %4, %0, %5 : tensor<3x3xi1>, tensor<3x3xf32>
            return %6, %1 : tensor<3x3xf32>, tensor<3x2xf32>""",
        ),
        (np.array([[4, 1, 0], [1, 3, 1], [0, 1, 2]], np.float32), _floats(3, 2)),
    ),
    "counted up to an argument's constant": (
        _module(
            "%x: tensor<5x2xf32>) -> (tensor<i64>, tensor<5x2xf32>)",
            """%c1 = stablehlo.constant dense<1> : tensor<i64>
            %c2 = stablehlo.constant dense<2> : tensor<i64>
            %c5 = stablehlo.constant dense<5> : tensor<i64>
            %z = stablehlo.constant dense<0> : tensor<i64>
            %0:3 = stablehlo.while(%i = %c2, %n = %c5, %y = %x) : tensor<i64>, tensor<i64>, tensor<5x2xf32>
            cond {
              %1 = stablehlo.compare GT, %n, %i : (tensor<i64>, tensor<i64>) -> tensor<i1>
              stablehlo.return %1 : tensor<i1>
            } do {
              %2 = stablehlo.dynamic_slice %y, %i, %z, sizes = [1, 2] : (tensor<5x2xf32>, tensor<i64>, tensor<i64>)
              -> tensor<1x2xf32>
              %3 = stablehlo.negate %2 : tensor<1x2xf32>
              %4 = stablehlo.dynamic_update_slice %y, %3, %i, %z
              : (tensor<5x2xf32>, tensor<1x2xf32>, tensor<i64>, tensor<i64>) -> tensor<5x2xf32>
              %5 = stablehlo.add %c1, %i : tensor<i64>
              stablehlo.return %5, %n, %4 : tensor<i64>, tensor<i64>, tensor<5x2xf32>
            }
            return %0#0, %0#2 : tensor<i64>, tensor<5x2xf32>""",
        ),
        (_floats(5, 2),),
    ),
    "never": (
        _module(
            "%x: tensor<2xf32>) -> tensor<2xf32>",
            """%c1 = stablehlo.constant dense<1> : tensor<i32>
            %c3 = stablehlo.constant dense<3> : tensor<i32>
            %0:2 = stablehlo.while(%i = %c3, %y = %x) : tensor<i32>, tensor<2xf32>
            cond {
              %1 = stablehlo.compare LT, %i, %c1 : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %1 : tensor<i1>
            } do {
              %2 = stablehlo.negate %y : tensor<2xf32>
              %3 = stablehlo.add %i, %c1 : tensor<i32>
              stablehlo.return %3, %2 : tensor<i32>, tensor<2xf32>
            }
            return %0#1 : tensor<2xf32>""",
        ),
        (_floats(2),),
    ),
    "composite": (
        "module { func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
        '%0 = stablehlo.composite "own.twice" %x {decomposition = @twice} : (tensor<2xf32>) -> tensor<2xf32>\n'
        "return %0 : tensor<2xf32> }\nfunc.func private @twice(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
        "%0 = stablehlo.add %x, %x : tensor<2xf32>\nreturn %0 : tensor<2xf32> } }",
        (_floats(2),),
    ),
    "index vectors first": (
        _module(
            "%x: tensor<4x3xf32>, %i: tensor<1x2xi32>) -> tensor<2x3xf32>",
            """%0 = "stablehlo.gather"(%x, %i) {dimension_numbers = #stablehlo.gather<offset_dims = [1],
            collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 0>,
            slice_sizes = array<i64: 1, 3>} : (tensor<4x3xf32>, tensor<1x2xi32>) -> tensor<2x3xf32>
            return %0 : tensor<2x3xf32>""",
        ),
        (_floats(4, 3), np.array([[9, 1]], np.int32)),
    ),
    "mapped": (
        _module(
            "%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32>",
            f"""%0 = "stablehlo.map"(%x, %y) ({{
            ^bb0({_OF_TWO}):
              %1 = stablehlo.multiply %a, %b : tensor<f32>
              stablehlo.return %1 : tensor<f32>
            }}) {{dimensions = array<i64: 0>}} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
            return %0 : tensor<4xf32>""",
        ),
        (_floats(4), _floats(4)),
    ),
}
"""Texts that JAX does not write, with arguments."""
