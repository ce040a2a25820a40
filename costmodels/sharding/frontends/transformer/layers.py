"""Operators of decoder layers with their gradients and sharding rules.

`dims.rule_of` explains the patterns of factor names. If an operator writes several results, some of them may lack a
factor that others carry. They are then partial sums over that factor. For example, the gradient of a norm writes the
input's gradient, which is partitioned by the batch, and the weight's gradient, which is summed over it.

Every function takes the training step and the operator's name first, reads tensors of the step, and returns the numbers
of the tensors that it writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from costmodels.sharding.frontends.transformer.training_step import Result, TrainingStep
from costmodels.sharding.graph import TensorKind

STATISTIC_BYTES = 4
"""Size of one element of the statistics that a softmax keeps for its backward pass (float32, as in all fused kernels).
"""

OF_A_PARAMETER = Result(kind=TensorKind.GRADIENT)


def linear(
    step: TrainingStep,
    name: str,
    x: tuple[int, str],
    weights: Sequence[tuple[int, str]],
    outputs: Sequence[tuple[str, str]],
    *,
    precision: str,
    primitive: str = "matmul",
    is_detached: bool = False,
) -> tuple[int, ...]:
    """Add the products of one tensor with one or several weights as one operator, which adds up their input gradients.

    Factors that only some of the weights have are blocked. Otherwise the products without the factor would be computed
    on several devices, and their gradients added up as often. One product takes 2 m n k FLOPs, and each of its two
    gradients takes the same.

    Args:
        step: Training step under construction.
        name: Name of the operator; its gradients are called `.data_gradient` and `.weight_gradient`.
        x: Input tensor and its pattern.
        weights: Weight tensors and their patterns.
        outputs: Label and pattern of each product; a label may be empty.
        precision: Data type of the arithmetic.
        primitive: `matmul`, or `batch_matmul` if the weight shares a dim with both other tensors.
        is_detached: Whether no gradient of the input is computed.
    """
    tensor, pattern = x
    factors = [_names(f"{weight} {output}") for (_, weight), (_, output) in zip(weights, outputs, strict=True)]
    # Block every factor that is missing in at least one of the products.
    blocked = sorted({name for each in factors for name in each if any(name not in other for other in factors)})
    flop = sum(2.0 * math.prod(step.sizes[factor] for factor in each | _names(pattern)) for each in factors)
    numbers = [weight for weight, _ in weights]
    of_weights = ", ".join(weight for _, weight in weights)
    of_outputs = ", ".join(output for _, output in outputs)
    made = step.op(
        name,
        primitive,
        f"{pattern}, {of_weights} -> {of_outputs}",
        (tensor, *numbers),
        results=[Result(label=label) for label, _ in outputs],
        blocked=blocked,
        flop=flop,
        precision=precision,
    )

    def gradients() -> None:
        given = [step.gradient(each) for each in made]
        if not is_detached:
            # One operator computes the input gradients of all products and adds them up locally.
            (to_x,) = step.op(
                f"{name}.data_gradient",
                f"{primitive}_data_gradient",
                f"{of_outputs}, {of_weights} -> {pattern}",
                (*given, *numbers),
                blocked=blocked,
                flop=flop,
                precision=precision,
            )
            step.give(tensor, to_x)
        to_weights = step.op(
            f"{name}.weight_gradient",
            f"{primitive}_weight_gradient",
            f"{pattern}, {of_outputs} -> {of_weights}",
            (tensor, *given),
            results=[Result(label=label, kind=TensorKind.GRADIENT) for label, _ in outputs],
            blocked=blocked,
            flop=flop,
            precision=precision,
        )
        for weight, to_weight in zip(numbers, to_weights, strict=True):
            step.give(weight, to_weight)

    step.on_backward(gradients)
    return made


def bias(step: TrainingStep, name: str, x: int, pattern: str) -> int:
    """Add the addition of a new parameter that has some of the tensor's dims."""
    # The bias's gradient sums over the dims that the bias lacks.
    parameter = step.parameter(f"{name}.bias", pattern)
    (made,) = step.along(name, "bias", (x, parameter), (x,))

    def gradients() -> None:
        given = step.gradient(made)
        step.give(x, given)
        (to_bias,) = step.along(f"{name}.gradient", "bias_gradient", (given,), (parameter,), results=(OF_A_PARAMETER,))
        step.give(parameter, to_bias)

    step.on_backward(gradients)
    return made


def norm(step: TrainingStep, name: str, x: int, *, over: str, has_bias: bool = False) -> int:
    """Add a normalisation along the dims of a pattern, which stay whole; the backward pass computes its sums again."""
    # RMSNorm has a scale only; LayerNorm has a bias, too.
    parameters = [step.parameter(f"{name}.weight", over)]
    if has_bias:
        parameters.append(step.parameter(f"{name}.bias", over))
    primitive = "layer_norm" if has_bias else "rms_norm"
    blocked = step.tensor(parameters[0]).dim_names
    (made,) = step.along(name, primitive, (x, *parameters), (x,), blocked=blocked)

    labels = ("weight", "bias")[: len(parameters)]
    results = (Result(), *(Result(label=label, kind=TensorKind.GRADIENT) for label in labels))
    step.on_backward_of(
        made,
        lambda operands: step.along(
            f"{name}.gradient", f"{primitive}_gradient", operands, (x, *parameters), results=results, blocked=blocked
        ),
        (x, parameters[0], None),
        (x, *parameters),
    )
    return made


def add(step: TrainingStep, name: str, parts: Sequence[int]) -> int:
    """Add the sum of several tensors; the gradient of each is the gradient of the sum."""
    (made,) = step.along(name, "add", parts, parts[:1])

    def gradients() -> None:
        for part in parts:
            step.give(part, step.gradient(made))

    step.on_backward(gradients)
    return made


def rotary(step: TrainingStep, name: str, x: int) -> int:
    """Add the rotary position embedding, which needs each head whole."""
    (made,) = step.along(name, "rotary", (x,), (x,), blocked=("head_dim",))

    step.on_backward_of(
        made,
        lambda given: step.along(f"{name}.gradient", "rotary_gradient", given, given, blocked=("head_dim",)),
        (None,),
        (x,),
    )
    return made


def latent_key(step: TrainingStep, name: str, plain: int, turned: int) -> int:
    """Add the keys of latent attention: a plain part per head, and a rotary part that all heads share."""
    # The rotary part has no head dim: all heads share it.
    parts = ("batch sequence kv_heads plain_dim", "batch sequence rotary_dim")
    whole = "batch sequence kv_heads head_dim"
    blocked = ("plain_dim", "rotary_dim", "head_dim")
    (made,) = step.op(name, "latent_key", f"{', '.join(parts)} -> {whole}", (plain, turned), blocked=blocked)

    pattern, results = f"{whole} -> {', '.join(parts)}", (Result(label="plain"), Result(label="rotary"))
    step.on_backward_of(
        made,
        lambda given: step.op(
            f"{name}.gradient", "latent_key_gradient", pattern, given, results=results, blocked=blocked
        ),
        (None,),
        (plain, turned),
    )
    return made


def kernel(
    step: TrainingStep,
    name: str,
    primitive: str,
    operands: Mapping[str, tuple[int, str]],
    results: Mapping[Result, str],
    *,
    blocked: Sequence[str],
    flop: float = 0.0,
    gradient_flop: float = 0.0,
    precision: str = "",
    reads_results: bool = True,
) -> tuple[int, ...]:
    """Add an operator, and one of the backward pass that computes the gradients of all of its operands.

    Args:
        step: Training step under construction.
        name: Name of the operator; its gradient is called `.gradient`.
        primitive: Name of the computation.
        operands: Tensors with their patterns, by the labels of their gradients.
        results: Patterns of the results; the gradient of the first one arrives from its readers, the others are kept.
        blocked: Factors that the operator needs whole.
        flop: FLOPs of the forward pass.
        gradient_flop: FLOPs of the backward pass.
        precision: Data type of the arithmetic.
        reads_results: Whether the backward pass reads the results, too.
    """
    tensors, patterns = zip(*operands.values(), strict=True)
    read, written = ", ".join(patterns), list(results.values())
    made = step.op(
        name,
        primitive,
        f"{read} -> {', '.join(written)}",
        tensors,
        results=tuple(results),
        blocked=blocked,
        flop=flop,
        precision=precision,
    )
    gradients = tuple(
        Result(label=label, kind=TensorKind.GRADIENT)
        if step.tensor(tensor).kind is TensorKind.PARAMETER
        else Result(label=label)
        for label, (tensor, _) in operands.items()
    )
    kept = (made, written) if reads_results else ((), [])
    step.on_backward_of(
        made[0],
        lambda given: step.op(
            f"{name}.gradient",
            f"{primitive}_gradient",
            f"{', '.join([*patterns, *kept[1], written[0]])} -> {read}",
            given,
            results=gradients,
            blocked=blocked,
            flop=gradient_flop,
            precision=precision,
        ),
        (*tensors, *kept[0], None),
        tensors,
    )
    return made


def attention_core(
    step: TrainingStep, name: str, operands: Mapping[str, int], *, primitive: str, share: float, precision: str
) -> int:
    """Add flash attention as one operator: softmax of the scores, times the values.

    The queries can be partitioned along the sequence, in which case keys and values are gathered. The keys cannot be
    partitioned, nor the dims of a head. If the queries are partitioned, the gradients of keys and values are partial
    sums. Each device is assumed to get an equal share of what the mask lets through, as runtimes balance it. The
    backward pass takes five products for the forward pass's two (Dao 2023, FlashAttention-2, section 4.1).

    Args:
        step: Training step under construction.
        name: Name of the operator.
        operands: Queries, keys and values by these names, perhaps a `sink`, and the numbers of `chosen` keys.
        primitive: Name of the computation.
        share: Share of the scores that the mask lets through.
        precision: Data type of the arithmetic.
    """
    # Grouped-query attention: the query heads of one key head are adjacent, so an axis can serve kv_heads alone.
    heads = "(kv_heads query_groups)"
    patterns = {
        "queries": f"batch queries {heads} head_dim",
        "keys": "batch keys kv_heads head_dim",
        "values": "batch keys kv_heads value_dim",
        "sink": heads,
        "chosen": "batch queries chosen",
    }
    sizes = step.sizes
    scores = math.prod(sizes[factor] for factor in ("batch", "queries", "kv_heads", "query_groups", "keys"))
    # Two products, scores and context, of 2 FLOPs per element that the mask lets through.
    flop = 2.0 * scores * (sizes["head_dim"] + sizes["value_dim"]) * share
    # Besides the result, keep the log-sum-exp of each query for the backward pass.
    results = {
        Result(label="context"): f"batch queries {heads} value_dim",
        Result(label="normaliser", element_bytes=STATISTIC_BYTES): f"batch queries {heads}",
    }
    made, _ = kernel(
        step,
        name,
        primitive,
        {label: (tensor, patterns[label]) for label, tensor in operands.items()},
        results,
        blocked=("keys", "head_dim", "value_dim", *(["chosen"] if "chosen" in operands else [])),
        flop=flop,
        gradient_flop=2.5 * flop,
        precision=precision,
    )
    return made


def activation(step: TrainingStep, name: str, x: int, pattern: str, *, is_gated: bool) -> int:
    """Add the non-linearity of an MLP; a gated one combines two inputs.

    Args:
        step: Training step under construction.
        name: Name of the operator.
        x: Input tensor; a gated one has a dim `gates` before its last dim.
        pattern: Pattern of the result.
        is_gated: Whether the non-linearity has a gate.
    """
    # The two inputs of a gate are stacked before the last dim, so that a partition of it splits both.
    rest, _, ffn = pattern.rpartition(" ")
    inputs = f"{rest} gates {ffn}" if is_gated else pattern
    blocked = ("gates",) if is_gated else ()
    primitive = "gated_activation" if is_gated else "activation"
    (made,) = step.op(name, primitive, f"{inputs} -> {pattern}", (x,), blocked=blocked)

    backward = f"{inputs}, {pattern} -> {inputs}"
    step.on_backward_of(
        made,
        lambda operands: step.op(f"{name}.gradient", f"{primitive}_gradient", backward, operands, blocked=blocked),
        (x, None),
        (x,),
    )
    return made


def embedding(step: TrainingStep, name: str, tokens: int, table: int) -> int:
    """Add the lookup of rows in a table; a device yields zeros for rows of a partitioned vocabulary that it lacks."""
    # The vocabulary is a reduction: every device adds the rows that it has.
    rows, hidden = "vocabulary hidden", "batch sequence hidden"
    (made,) = step.op(name, "embedding", f"batch sequence, {rows} -> {hidden}", (tokens, table))

    backward = f"batch sequence, {hidden} -> {rows}"
    step.on_backward_of(
        made,
        lambda operands: step.op(
            f"{name}.gradient", "embedding_gradient", backward, operands, results=(OF_A_PARAMETER,)
        ),
        (tokens, None),
        (table,),
    )
    return made


def learned_positions(step: TrainingStep, name: str, x: int, table: int) -> int:
    """Add the first rows of a table of positions.

    The sequence can be partitioned if the table has exactly as many rows as the sequence has tokens.
    """
    # Parts of a table that is longer than the sequence would not match parts of the sequence.
    is_whole = step.sizes["positions"] == step.sizes["sequence"]
    rows = "sequence hidden" if is_whole else "positions hidden"
    hidden = "batch sequence hidden"
    blocked = () if is_whole else ("sequence", "positions")
    (made,) = step.op(name, "positions", f"{hidden}, {rows} -> {hidden}", (x, table), blocked=blocked)

    def gradients() -> None:
        given = step.gradient(made)
        step.give(x, given)
        (to_table,) = step.op(
            f"{name}.gradient",
            "positions_gradient",
            f"{hidden} -> {rows}",
            (given,),
            results=(OF_A_PARAMETER,),
            blocked=blocked,
        )
        step.give(table, to_table)

    step.on_backward(gradients)
    return made


def cross_entropy(step: TrainingStep, name: str, logits: int, labels: int) -> int:
    """Add the mean cross-entropy loss.

    If the vocabulary is partitioned, the maximum, the sum and the label's logit of each token are partial results.
    Maxima are combined with a maximum instead of a sum; the message is the same.
    """
    rows, scores = "batch sequence", "batch sequence vocabulary"
    # The loss is split into operators that each reduce over the vocabulary, as Megatron-LM's parallel cross entropy
    # does.
    statistic = (Result(element_bytes=STATISTIC_BYTES),)
    (largest,) = step.op(f"{name}.maximum", "maximum", f"{scores} -> {rows}", (logits,), results=statistic)
    (total,) = step.op(
        f"{name}.sum", "exponential_sum", f"{scores}, {rows} -> {rows}", (logits, largest), results=statistic
    )
    (chosen,) = step.op(
        f"{name}.label", "label_logit", f"{scores}, {rows} -> {rows}", (logits, labels), results=statistic
    )
    (made,) = step.op(name, "mean_loss", f"{rows}, {rows}, {rows} -> 1", (largest, total, chosen), results=statistic)

    def gradients() -> None:
        (to_logits,) = step.op(
            f"{name}.gradient",
            "cross_entropy_gradient",
            f"{scores}, {rows}, {rows}, {rows} -> {scores}",
            (logits, largest, total, labels),
        )
        step.give(logits, to_logits)

    step.on_backward(gradients)
    return made


def _names(pattern: str) -> set[str]:
    return set(re.findall(r"[a-z_]+", pattern))
