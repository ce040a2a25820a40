"""Functions that ranks run in the tests of split attention; a separate module, because ranks import it by name."""

from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Attention problem, and its division over cp * up ranks."""

    cp: int = 1
    up: int = 1
    heads: int = 8
    kv_heads: int = 8
    checkpointed: bool = False
    dtype: str = "float32"
    sequence_length: int = 48
    batch: int = 2
    head_dim: int = 8


def whole_tensors(case):
    """Build q, k, v and the gradient of the result for the whole sequence [b, s, h or g, d]."""
    import torch

    generator = torch.Generator().manual_seed(7)
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.sequence_length, count, case.head_dim) for count in counts]
    return [torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)) for shape in shapes]


def attend_to_local_positions(place, case):
    """Report this rank's positions, its result, and its gradients of q, k and v, as float32 arrays."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    from trials.torch_training.model.attention import attend, local_positions
    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (case.cp, case.up), mesh_dim_names=("cp", "up"))
        ring, ulysses = mesh.get_group("cp"), mesh.get_group("up") if case.up > 1 else None
        positions = local_positions(
            case.sequence_length,
            cp=case.cp,
            up=case.up,
            cp_rank=mesh.get_local_rank("cp"),
            up_rank=mesh.get_local_rank("up"),
        )
        *inputs, grad = (x[:, positions] for x in whole_tensors(case))
        leaves = [x.requires_grad_() for x in inputs]

        def attended(q, k, v):
            return attend(q, k, v, ring=ring, ulysses=ulysses)

        out = checkpoint(attended, *leaves, use_reentrant=False) if case.checkpointed else attended(*leaves)
        out.backward(grad)
        results = (out.detach(), *(leaf.grad for leaf in leaves))
        assert {x.dtype for x in results} == {grad.dtype}
        place.tell((positions.numpy(), *(x.to(torch.float32).numpy() for x in results)))


def count_bytes_on_ring(place, case):
    """Report the local attention, and then the bytes that this rank has sent by point-to-point messages."""
    import torch.distributed as dist

    start = dist.batch_isend_irecv
    sent = []

    def counted(operations):
        sent.extend(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return start(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        attend_to_local_positions(place, case)
    place.tell(sum(sent))
