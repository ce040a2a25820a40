"""Kernels of Transformer Engine's extension for PyTorch, as the tensors that they make.

Transformer Engine's Python code runs above them as it is. Shapes and arguments follow its sources
(transformer_engine/pytorch/csrc/extensions, version 2.20); kernels that are left out say so.
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from tuner.rehearsal.torch_room.frameworks.flash_attention import offer_flash_attention
from tuner.rehearsal.torch_room.frameworks.quantized import dtype_of, quantized, shape_of, written
from tuner.rehearsal.torch_room.watch import NoStandInError, Watch

_TYPES: Any = enum.IntEnum(  # type: ignore[misc] # the name is that of the extension
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
_DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
_BACKENDS: Any = enum.IntEnum(  # type: ignore[misc] # as above
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)
_OF_FORWARD = ("INPUT", "WEIGHT", "OUTPUT")
_FORWARD: Any = enum.IntEnum(  # type: ignore[misc] # as above
    "FP8FwdTensors",
    [(f"GEMM{gemm}_{name}", 3 * gemm - 3 + at) for gemm in (1, 2, 3) for at, name in enumerate(_OF_FORWARD)],
)
_BACKWARD: Any = enum.IntEnum(  # type: ignore[misc] # as above
    "FP8BwdTensors",
    [(f"GRAD_{name}{gemm}", 2 * gemm - 2 + at) for gemm in (1, 2, 3) for at, name in enumerate(("OUTPUT", "INPUT"))],
)
_VERSIONS = {"get_cublasLt_version": 130100, "get_cudnn_version": 91900, "get_num_cublas_streams": 4}


class _Open(type):
    """Class with every attribute that it is asked for, each a number of its own, as an enumeration has."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len([known for known in vars(cls) if not known.startswith("__")])
        setattr(cls, name, value)
        return value

    def __call__(cls, *_: Any, **__: Any) -> Any:
        """Refuse to make an object: nothing stands for what it would do.

        Raises:
            NoStandInError: always.
        """
        raise NoStandInError(f"the rehearsal knows no class {cls.__name__} of Transformer Engine")


class Kernels:
    """Stand-ins of kernels, by their names."""

    def __init__(self, watch: Watch) -> None:
        self._note = watch.note

    def generic_gemm(
        self,
        a: Any,
        transa: bool,
        b: Any,
        transb: bool,
        out: Any,
        quantizer: Any,
        out_dtype: Any,
        *rest: Any,
        comm_overlap: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return `b @ a`, as cuBLAS does in column-major order; with `grad`, also the gradient of the bias."""
        if comm_overlap is not None:
            raise NoStandInError("the rehearsal knows no products that overlap with collectives of tp (userbuffers)")
        bias, bias_dtype, gelu, gelu_in, grad = rest[:5]
        left, right = shape_of(a), shape_of(b)
        rows = right[-1] if transb else right[:-1].numel()
        columns = left[:-1].numel() if transa else left[-1]
        self._note("te.gemm", tuple(left), tuple(right), (rows, columns))
        if out is None:
            lead = (rows,) if transb else tuple(right[:-1])
            out = written(quantizer, None, (*lead, columns), _dtype(out_dtype, dtype_of(b)))
        bias_gradient = _new((right[-1],), _dtype(bias_dtype, torch.bfloat16)) if grad and bias is not None else None
        gelu_input = _new(shape_of(out), dtype_of(out)) if gelu and not grad else gelu_in
        return out, bias_gradient, gelu_input, None

    def te_general_grouped_gemm(self, a: Any, transa: Any, b: Any, transb: Any, *rest: Any) -> Any:
        """Return the gradients of biases, which the caller made, of one product for each expert."""
        for one, other in zip(a, b, strict=True):
            self._note("te.grouped_gemm", tuple(shape_of(one)), tuple(shape_of(other)), (int(transa), int(transb)))
        return rest[3]

    def quantize(self, x: Any, quantizer: Any, out: Any = None, _noop: Any = None, **_: Any) -> Any:
        """Return the quantized tensor."""
        self._note("te.quantize", tuple(x.shape))
        return quantized(quantizer, x.shape, x.dtype) if out is None else out

    def bgrad_quantize(self, grad: Any, quantizer: Any) -> tuple[Any, Any]:
        """Return the gradient of the bias, and the quantized gradient."""
        self._note("te.quantize", tuple(grad.shape))
        return _new((grad.shape[-1],), grad.dtype), quantized(quantizer, grad.shape, grad.dtype)

    def split_quantize(self, x: Any, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
        """Return the quantized rows of each expert."""
        self._note("te.quantize", tuple(x.shape))
        pairs = zip(sizes, quantizers, strict=True)
        return [quantized(quantizer, (size, *x.shape[1:]), x.dtype) for size, quantizer in pairs]

    def create_empty_quantized_tensor(self, quantizer: Any, shape: Sequence[int], dtype: Any, *_: Any) -> Any:
        """Return a quantized tensor without values, such as a weight before it is initialized."""
        return quantized(quantizer, shape, dtype)

    def dequantize(self, x: Any, dtype: Any) -> Any:
        """Return the tensor of high precision."""
        self._note("te.dequantize", tuple(shape_of(x)))
        return _new(shape_of(x), _dtype(dtype, dtype_of(x)))

    def fp8_transpose(self, data: Any, _dtype_of_data: Any, *, out: Any = None) -> Any:
        """Return the transposed data: the last dimension first."""
        self._note("te.transpose", tuple(data.shape))
        return _new((data.shape[-1], *data.shape[:-1]), data.dtype) if out is None else out

    def swap_first_dims(self, x: Any, *, out: Any = None) -> Any:
        """Return the tensor with its first two dimensions exchanged."""
        self._note("te.transpose", tuple(x.shape))
        return _new((x.shape[1], x.shape[0], *x.shape[2:]), x.dtype) if out is None else out

    def fused_amax_and_scale_update_after_reduction(self, *_: Any) -> None:
        """Change the scales of delayed scaling in place."""

    compute_amax = multi_tensor_compute_scale_and_scale_inv = fused_amax_and_scale_update_after_reduction
    multi_tensor_compute_scale_inv_e8m0 = fused_amax_and_scale_update_after_reduction
    fp8_block_scaling_compute_partial_amax = fused_amax_and_scale_update_after_reduction
    fp8_block_scaling_partial_cast = fused_amax_and_scale_update_after_reduction
    mxfp8_scaling_compute_partial_amax = fused_amax_and_scale_update_after_reduction
    mxfp8_scaling_partial_cast = fused_amax_and_scale_update_after_reduction

    def rmsnorm_fwd(self, x: Any, _weight: Any, _eps: Any, out: Any, quantizer: Any, dtype: Any, *_: Any) -> Any:
        """Return the normed rows, nothing, and a statistic for each row."""
        self._note("te.rmsnorm_fwd", tuple(x.shape))
        return written(quantizer, out, x.shape, _dtype(dtype, x.dtype)), None, _new(x.shape[:1], torch.float32)

    def rmsnorm_bwd(self, grad: Any, x: Any, _rsigma: Any, weight: Any, *_: Any) -> Any:
        """Return the gradients of rows and weight."""
        self._note("te.rmsnorm_bwd", tuple(x.shape))
        return _new(x.shape, grad.dtype), _like(weight)

    def layernorm_fwd(
        self, x: Any, _weight: Any, _bias: Any, _eps: Any, out: Any, quantizer: Any, dtype: Any, *_: Any
    ) -> Any:
        """Return the normed rows and two statistics for each."""
        self._note("te.layernorm_fwd", tuple(x.shape))
        statistics = (_new(x.shape[:1], torch.float32) for _ in range(2))
        return (written(quantizer, out, x.shape, _dtype(dtype, x.dtype)), *statistics)

    def layernorm_bwd(self, grad: Any, x: Any, _mu: Any, _rsigma: Any, weight: Any, *_: Any) -> Any:
        """Return the gradients of rows, weight and bias."""
        self._note("te.layernorm_bwd", tuple(x.shape))
        return _new(x.shape, grad.dtype), _like(weight), _like(weight)

    def get_fused_attn_backend(self, *_: Any) -> Any:
        """Return that cuDNN has a fused attention."""
        return _BACKENDS["NVTE_F16_arbitrary_seqlen"], ""

    def fused_attn_fwd(self, max_q: int, max_kv: int, training: bool, *rest: Any) -> list[Any]:
        """Return the output, statistics of the softmax, and a random state."""
        q, _, v = rest[13:16]
        self._note(
            "te.attention_fwd",
            tuple(q.shape),
            tuple(v.shape),
            (rest[11].shape[0] - 1, max_q, max_kv, _is_causal(rest[7])),
        )
        out = _new((*q.shape[:-1], v.shape[-1]), q.dtype)
        batch = rest[11].shape[0] - 1
        statistics = _new((batch, q.shape[-2], max_q, 1), torch.float32)
        return [out, statistics, _new((2,), torch.int64)] if training else [out]

    def fused_attn_bwd(self, max_q: int, max_kv: int, *rest: Any) -> list[Any]:
        """Return the gradients of queries, keys and values."""
        q, k, v = rest[17:20]
        self._note(
            "te.attention_bwd",
            tuple(q.shape),
            tuple(v.shape),
            (rest[15].shape[0] - 1, max_q, max_kv, _is_causal(rest[10])),
        )
        return [_like(q), _like(k), _like(v), None, None]

    def fused_rope_forward(self, x: Any, *_: Any) -> Any:
        """Return the turned vectors; the backward pass turns them back."""
        self._note("te.rope", tuple(x.shape))
        return _like(x)

    fused_rope_backward = fused_rope_forward

    def scaled_softmax_forward(self, x: Any, *_: Any) -> Any:
        """Return the softmax of scores."""
        self._note("te.softmax_fwd", tuple(x.shape))
        return _like(x)

    def scaled_softmax_backward(self, grad: Any, *_: Any) -> Any:
        """Return the gradient, which is written over the one that came."""
        self._note("te.softmax_bwd", tuple(grad.shape))
        return grad

    scaled_masked_softmax_forward = scaled_upper_triang_masked_softmax_forward = scaled_softmax_forward
    scaled_aligned_causal_masked_softmax_forward = scaled_softmax_forward
    scaled_masked_softmax_backward = scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
    scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward

    def swiglu(self, x: Any, quantizer: Any = None, *_: Any, **__: Any) -> Any:
        """Return the gated half of the columns."""
        self._note("te.glu", tuple(x.shape))
        return written(quantizer, None, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)

    geglu = reglu = swiglu

    def dswiglu(self, grad: Any, x: Any, quantizer: Any = None, *_: Any, **__: Any) -> Any:
        """Return the gradient of both halves."""
        self._note("te.glu", tuple(x.shape))
        return written(quantizer, None, x.shape, grad.dtype)

    dgeglu = dreglu = dswiglu

    def scaled_swiglu(self, x: Any, _scale: Any, *_: Any) -> Any:
        """Return the gated half of the columns, each row times its probability."""
        return self.swiglu(x)

    def scaled_dswiglu(self, grad: Any, x: Any, scale: Any, *_: Any) -> Any:
        """Return the gradients of both halves and of the probabilities."""
        return self.dswiglu(grad, x), _like(scale)

    def fused_topk_with_score_function_fwd(
        self,
        logits: Any,
        topk: int,
        _pre_softmax: Any,
        _groups: Any,
        _group_topk: Any,
        _scale: Any,
        _function: Any,
        _bias: Any,
        layout: int = 0,
        indices: Any = None,
    ) -> tuple[Any, ...]:
        """Return the probabilities, the routing map, and the scores in fp32 (transformer_engine/pytorch/router.py)."""
        self._note("te.router", tuple(logits.shape), (topk,))
        routed = None if indices is not None else _routing_map(logits, layout)
        return _like(logits), routed, _new(logits.shape, torch.float32)

    def fused_topk_with_score_function_bwd(self, *given: Any) -> None:
        """Write the gradient of the router's output, which the caller made."""
        self._note("te.router", tuple(given[1].shape))

    def fused_score_for_moe_aux_loss_fwd(
        self, logits: Any, topk: int, routing_map_format: int = 0, **_: Any
    ) -> tuple[Any, ...]:
        """Return scores in fp32, the routing map, and what the backward pass reads, in fp32."""
        self._note("te.router", tuple(logits.shape), (topk,))
        scores, kept = (_new(logits.shape, torch.float32) for _ in range(2))
        return scores, _routing_map(logits, routing_map_format), kept

    def fused_score_for_moe_aux_loss_bwd(self, intermediate_output: Any, **_: Any) -> None:
        """Write the gradient of the router's output, which the caller made."""
        self._note("te.router", tuple(intermediate_output.shape))

    def fused_moe_aux_loss_fwd(self, probs: Any, **_: Any) -> tuple[Any, Any]:
        """Return the loss that balances experts, and its constant in fp32."""
        self._note("te.aux_loss", tuple(probs.shape))
        return _new((), probs.dtype), _new((), torch.float32)

    fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd

    def fused_moe_aux_loss_bwd(self, num_rows: int, num_cols: int, grad_aux_loss: Any, **_: Any) -> Any:
        """Return the gradient of the probabilities."""
        self._note("te.aux_loss", (num_rows, num_cols))
        return _new((num_rows, num_cols), grad_aux_loss.dtype)

    def multi_tensor_adam(self, *given: Any) -> None:
        """Change weights and moments in place."""
        self._note("te.adam", (sum(one.numel() for one in given[2][0]),))

    multi_tensor_adam_capturable = multi_tensor_adam_capturable_master = multi_tensor_adam
    multi_tensor_adam_param_remainder = multi_tensor_adam_fp8 = multi_tensor_adam

    def multi_tensor_scale(self, *given: Any, **_: Any) -> None:
        """Scale in place."""
        self._note("te.scale", (sum(one.numel() for one in given[2][0]),))

    multi_tensor_scale_tensor = multi_tensor_scale

    def multi_tensor_l2norm(self, _size: Any, _flag: Any, tensors: Sequence[Any], per_parameter: Any = False) -> Any:
        """Return the norm of all tensors, and of each if that is asked for."""
        self._note("te.l2norm", (sum(one.numel() for one in tensors[0]),))
        return _new((1,), torch.float32), _new((len(tensors[0]) if per_parameter else 0,), torch.float32)

    def multi_tensor_unscale_l2norm(self, size: Any, flag: Any, tensors: Any, _scale: Any, each: Any = False) -> Any:
        """Return norms as `multi_tensor_l2norm` does."""
        return self.multi_tensor_l2norm(size, flag, tensors, each)

    def get_stream_priority_range(self, *_: Any) -> tuple[int, int]:
        """Return the priorities that NVIDIA's devices have."""
        return 0, -5

    def device_supports_multicast(self, *_: Any) -> bool:
        """Return that buffers are not shared over NVLink's multicast."""
        return False

    def wgrad_gemm_accum(self, x: Any, grad: Any, _main_grad: Any) -> None:
        """Add a weight's gradient to the buffer of gradients (apex, fused_weight_gradient_mlp_cuda)."""
        self._note("te.gemm", tuple(x.shape), tuple(grad.shape), (grad.shape[-1], x.shape[-1]))


class Extension(ModuleType):
    """Stands for `transformer_engine_torch`: kernels, and enumerations that are made as they are asked for."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__("transformer_engine_torch")
        known = {name: _called(name, getattr(kernels, name)) for name in dir(kernels) if not name.startswith("_")}
        constants = {name: lambda _value=value: _value for name, value in _VERSIONS.items()}
        vars(self).update(known | constants, DType=_TYPES, NVTE_Fused_Attn_Backend=_BACKENDS)
        vars(self).update(FP8FwdTensors=_FORWARD, FP8BwdTensors=_BACKWARD)

    def __getattr__(self, name: str) -> Any:
        """Return an enumeration for a name that begins as a class, and what refuses to run for any other."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            setattr(self, name, _Open(name, (), {}))
            return getattr(self, name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NoStandInError(f"the rehearsal knows no kernel {name} of Transformer Engine")

        return missing


def stand_in_for_kernels(watch: Watch) -> bool:
    """Let Transformer Engine and kernels of apex be imported; return whether Transformer Engine is there."""
    kernels = Kernels(watch)
    apex: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = kernels.wgrad_gemm_accum
    sys.modules["fused_weight_gradient_mlp_cuda"] = apex
    for name in ("scaled_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"):
        softmax: Any = ModuleType(name)
        softmax.forward, softmax.backward = kernels.scaled_softmax_forward, kernels.scaled_softmax_backward
        softmax.get_batch_per_block = _rows_at_once
        sys.modules[name] = softmax
    # With this, its package loads no library of CUDA (transformer_engine/common/__init__.py).
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    sys.modules["transformer_engine_torch"] = Extension(kernels)
    try:
        common = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda _: None  # type: ignore[attr-defined]
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "transformer_engine":
            del sys.modules["transformer_engine_torch"]
            return False
        raise
    parameters: Any = utils.AttentionParams
    make = parameters.__init__

    def of_plain_tensors(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        object.__setattr__(self, "qkv_type", torch.Tensor)  # not FakeTensor, which it would refuse

    parameters.__init__ = of_plain_tensors
    offer_flash_attention(utils, watch)
    return True


def _rows_at_once(_queries: int, keys: int, *_: int) -> int:
    """Return how many rows a block of threads takes (apex, csrc/megatron/scaled_masked_softmax.h)."""
    padded = 1 << (keys - 1).bit_length()
    return 128 // min(padded, 32) * (2 if padded <= 128 else 1)


def _called(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel refuse arguments that its stand-in does not know."""

    def call(*given: Any, **named: Any) -> Any:
        try:
            return kernel(*given, **named)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise NoStandInError(f"the rehearsal knows kernel {name} with other arguments ({error})") from error

    return call


def _is_causal(mask: int) -> int:
    """Return 1 for a mask that hides later keys, else 0."""
    kinds: Any = sys.modules["transformer_engine_torch"].NVTE_Mask_Type
    return int(any(mask == value for name, value in vars(kinds).items() if "CAUSAL" in name))


def _routing_map(logits: torch.Tensor, layout: int) -> torch.Tensor:
    """Return which experts each token goes to: a bool for each, or a bit."""
    if layout == sys.modules["transformer_engine_torch"].NVTERoutingMapFormat.BYTEMAP:
        return _new(logits.shape, torch.bool)
    return _new((*logits.shape[:-1], -(-logits.shape[-1] // 8)), torch.uint8)


def _dtype(given: Any, default: torch.dtype) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    return default if given is None else _DTYPES[int(given)]


def _new(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return _new(tensor.shape, tensor.dtype)
