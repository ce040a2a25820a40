"""Small GPT training program over gloo with random tokens, and with Megatron-LM's flags and log format.

It supports tensor, sequence and data parallelism, and represents a user's own training program: Meshtune knows only
train.sh and the log lines. Like a real program, it refuses unsupported settings: pipelines and context parallelism.

Weights and data are those of their names and numbers, whatever the layout is, and a checkpoint of one layout is read by
any other (torch.distributed.checkpoint), so that a training may change its layout as it goes.
"""

import argparse
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SHARDED = {"qkv": 1, "qkv_bias": 1, "out.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1}
"""Dimension in which each weight of a layer is sharded over the tensor parallel ranks; the others are whole."""


def parse_arguments():
    """Return the command line's values under Megatron-LM's names."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "vocab-size", "max-position-embeddings"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("seq-length", "micro-batch-size", "global-batch-size", "train-iters"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--position-embedding-type", choices=["learned_absolute"], default="learned_absolute")
    parser.add_argument("--log-interval", type=int, default=100)
    parser.add_argument("--save-interval", type=int)
    parser.add_argument("--exit-interval", type=int)
    for name in ("load", "save"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--optimizer", choices=["adam"], default="adam")
    parser.add_argument("--recompute-granularity", choices=["full"])
    parser.add_argument("--recompute-method", choices=["uniform"])
    parser.add_argument("--recompute-num-layers", type=int, default=1)
    for name in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"):
        parser.add_argument(f"--{name}", action="store_true")
    found = parser.parse_args()
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(found, name) > 1:
            raise ValueError(f"this program has no {name} above 1")
    return found


class Exchange(torch.autograd.Function):
    """Collective over the tensor parallel ranks whose gradient is another collective."""

    @staticmethod
    def forward(context, x, forth, back):
        context.back = back
        return forth(x)

    @staticmethod
    def backward(context, gradient):
        return context.back(gradient), None, None


class TensorParallel:
    """Conversion of activations at the borders of a tensor parallel region: Megatron-LM's f and g.

    With sequence parallelism, activations outside the region are sharded along the sequence.
    """

    def __init__(self, group, *, sequence_parallel):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.shards_sequence = sequence_parallel and self.size > 1

    def enter(self, x):
        """Return the activations of all tokens, as the ranks' parts of a matrix product need them."""
        if self.shards_sequence:
            return Exchange.apply(x, self._all_gather, self._reduce_scatter)
        return self._exchange_replicated(x, False)

    def leave(self, x):
        """Return the sum of the ranks' parts, for the rank's own tokens only if the sequence is sharded."""
        if self.shards_sequence:
            return Exchange.apply(x, self._reduce_scatter, self._all_gather)
        return self._exchange_replicated(x, True)

    def own_tokens(self, x):
        """Return the rank's part of a sequence that all ranks hold."""
        return Exchange.apply(x, self._own_chunk, self._all_gather) if self.shards_sequence else x

    def all_tokens(self, x):
        """Return the whole sequence, for a loss that every rank computes."""
        return Exchange.apply(x, self._all_gather, self._own_chunk) if self.shards_sequence else x

    def _exchange_replicated(self, x, sums_forward):
        both = (self._all_reduce, lambda y: y) if sums_forward else (lambda y: y, self._all_reduce)
        return Exchange.apply(x, *both)

    def _all_reduce(self, x):
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.group)
        return x

    def _own_chunk(self, x):
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def _all_gather(self, x):
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def _reduce_scatter(self, x):
        return self._own_chunk(self._all_reduce(x))


class Layer(nn.Module):
    """Transformer layer in which each rank holds a share of the heads and of the MLP's inner size."""

    def __init__(self, args, tensor):
        super().__init__()
        hidden, share = args.hidden_size, args.hidden_size // tensor.size
        self.tensor, self.head_size = tensor, hidden // args.num_attention_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.qkv_bias = nn.Parameter(torch.empty(3, share, hidden)), nn.Parameter(torch.zeros(3, share))
        self.out = nn.Linear(share, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * share), nn.Linear(4 * share, hidden, bias=False)

    def forward(self, x):
        weight, bias = self.qkv.flatten(0, 1), self.qkv_bias.flatten()
        y = functional.linear(self.tensor.enter(self.before_attention(x)), weight, bias)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in y.chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.tensor.leave(self.out(attended.transpose(1, 2).flatten(2)))
        inner = functional.gelu(self.up(self.tensor.enter(self.before_mlp(x))))
        return x + self.tensor.leave(self.down(inner))


class GPT(nn.Module):
    """GPT model that returns the mean loss of all tokens."""

    def __init__(self, args, tensor):
        super().__init__()
        self.tensor, self.recomputes = tensor, args.recompute_granularity == "full"
        self.tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.positions = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.layers = nn.ModuleList(Layer(args, tensor) for _ in range(args.num_layers))
        self.norm = nn.LayerNorm(args.hidden_size)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() > 1:
                self._draw(name, weight)

    def _draw(self, name, weight):
        """Draw a whole weight by its name, the same on every rank, and keep the rank's part."""
        at, size = self.sharded(name), self.tensor.size
        whole = [length * size if at == dimension else length for dimension, length in enumerate(weight.shape)]
        drawn = 0.02 * torch.randn(whole, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        weight.data = drawn if at is None else drawn.chunk(size, dim=at)[self.tensor.rank].contiguous()

    @staticmethod
    def sharded(name):
        """Return the dimension in which a weight is sharded over the tensor parallel ranks; None if it is not."""
        return next((at for end, at in SHARDED.items() if name.endswith(f".{end}")), None)

    def forward(self, tokens, targets):
        x = self.tensor.own_tokens(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        logits = self.tensor.all_tokens(self.norm(x)) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Optimizer:
    """Adam with averaged gradients.

    The distributed optimizer updates a share of the parameters on each data parallel rank, and broadcasts the result.
    """

    def __init__(self, model, args, data):
        self.parameters, self.data, self.tensor = list(model.parameters()), data, model.tensor
        self.norms = [p for name, p in model.named_parameters() if "norm" in name or "before" in name]
        self.size, rank = dist.get_world_size(data), dist.get_rank(data)
        self.shared = args.use_distributed_optimizer and self.size > 1
        self.own = self.parameters[rank :: self.size] if self.shared else self.parameters
        self.adam = torch.optim.Adam(self.own, lr=args.lr)

    def step(self):
        """Update all parameters on all ranks."""
        if self.tensor.shards_sequence:  # norms have seen only the rank's own tokens
            for parameter in self.norms:
                dist.all_reduce(parameter.grad, group=self.tensor.group)
        if self.size > 1:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad, group=self.data)
                parameter.grad /= self.size
        self.adam.step()
        if self.shared:
            ranks = dist.get_process_group_ranks(self.data)
            for number, parameter in enumerate(self.parameters):
                dist.broadcast(parameter.data, ranks[number % self.size], group=self.data)
        for parameter in self.parameters:
            parameter.grad = None


class Checkpoint:
    """Weights and Adam's states as tensors of the whole job, whatever the layout is.

    As in Megatron-LM, a folder holds one subfolder for each saved iteration, and a file with the number of the latest.
    """

    LATEST = "latest_checkpointed_iteration.txt"

    def __init__(self, model, optimizer, mesh):
        self.model, self.optimizer, self.mesh = model, optimizer, mesh["tensor"]
        for parameter in optimizer.own:  # Adam makes its states at the first step, and a checkpoint has to fill them
            optimizer.adam.state.setdefault(parameter, {"step": torch.tensor(0.0)}).update(
                {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            )

    def load(self, folder):
        """Load the latest checkpoint of a folder, and return its iteration; 0 if there is none."""
        latest = folder / self.LATEST
        if not latest.exists():
            return 0
        iteration = int(latest.read_text(encoding="utf-8"))
        dcp.load(self._tensors(), checkpoint_id=folder / f"iter_{iteration:07}")
        for parameter in self.optimizer.own:
            self.optimizer.adam.state[parameter]["step"].fill_(iteration)
        return iteration

    def save(self, folder, iteration):
        """Save, and name the checkpoint as the latest once it is whole."""
        dcp.save(self._tensors(), checkpoint_id=folder / f"iter_{iteration:07}")
        if dist.get_rank() == 0:
            (folder / self.LATEST).write_text(str(iteration), encoding="utf-8")

    def _tensors(self):
        found = {}
        for name, parameter in self.model.named_parameters():
            at = self.model.sharded(name)
            placement = [Replicate() if at is None else Shard(at)]
            states = self.optimizer.adam.state.get(parameter, {})  # those of other ranks are saved there
            for kind, local in {"weight": parameter.data, **states}.items():
                if kind != "step":
                    found[f"{kind}.{name}"] = DTensor.from_local(local, self.mesh, placement, run_check=False)
        return found


def batches(args, iteration, rank, size):
    """Yield the micro-batches of a data parallel rank in an iteration."""
    draw = torch.Generator().manual_seed(5678 + iteration)
    whole = torch.randint(args.vocab_size, (args.global_batch_size, args.seq_length + 1), generator=draw)
    # each token comes twice, so that there is something to learn
    whole[:, 1::2] = whole[:, 0:-1:2]
    yield from whole.chunk(size)[rank].split(args.micro_batch_size)


def main():
    """Train, and print Megatron-LM's log lines on the last rank."""
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, tp = dist.get_world_size(), args.tensor_model_parallel_size
    if world % tp or args.global_batch_size % (args.micro_batch_size * (world // tp)):
        raise ValueError(f"{world} ranks and {args.global_batch_size} sequences do not fit tp {tp}")
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("data", "tensor"))
    tensor = TensorParallel(mesh.get_group("tensor"), sequence_parallel=args.sequence_parallel)
    model = GPT(args, tensor)
    optimizer = Optimizer(model, args, mesh.get_group("data"))
    stored = Checkpoint(model, optimizer, mesh)
    begun = stored.load(args.load) if args.load else 0
    num_micro_batches = args.global_batch_size // (args.micro_batch_size * (world // tp))
    is_last = dist.get_rank() == world - 1
    if is_last:
        print("> building GPT model ...", flush=True)
    started_s = time.perf_counter()
    for iteration in range(begun + 1, args.train_iters + 1):
        total = torch.zeros(())
        for text in batches(args, iteration, mesh.get_local_rank("data"), world // tp):
            loss = model(text[:, :-1], text[:, 1:]) / num_micro_batches
            loss.backward()
            total += loss.detach() / (world // tp)
        dist.all_reduce(total, group=mesh.get_group("data"))
        optimizer.step()
        if iteration % args.log_interval == 0:
            elapsed_ms = 1000 * (time.perf_counter() - started_s) / args.log_interval
            if is_last:
                print(
                    f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {iteration:8d}/{args.train_iters:8d} | "
                    f"consumed samples: {iteration * args.global_batch_size:12d} | "
                    f"elapsed time per iteration (ms): {elapsed_ms:.1f} | "
                    f"learning rate: {args.lr:.6E} | global batch size: {args.global_batch_size:5d} | "
                    f"lm loss: {total:.6E} | "
                    "number of skipped iterations:   0 | number of nan iterations:   0 |",
                    flush=True,
                )
            started_s = time.perf_counter()
        ends = iteration == args.train_iters or (args.exit_interval and iteration % args.exit_interval == 0)
        if args.save and (ends or (args.save_interval and iteration % args.save_interval == 0)):
            stored.save(args.save, iteration)
        if ends:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
