"""Small GPT training program over gloo with random tokens, and with Megatron-LM's flags and log format.

It supports tensor, sequence and data parallelism, and represents a user's own training program: Meshtune knows only
train.sh and the log lines. Like a real program, it refuses unsupported settings: pipelines and context parallelism.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
        self.qkv, self.out = nn.Linear(hidden, 3 * share), nn.Linear(share, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * share), nn.Linear(4 * share, hidden, bias=False)

    def forward(self, x):
        y = self.qkv(self.tensor.enter(self.before_attention(x)))
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
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        torch.manual_seed(1234 + tensor.rank)  # the layers below are sharded, so each rank draws its own weights
        self.layers = nn.ModuleList(Layer(args, tensor) for _ in range(args.num_layers))
        self.norm = nn.LayerNorm(args.hidden_size)

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
        own = self.parameters[rank :: self.size] if self.shared else self.parameters
        self.adam = torch.optim.Adam(own, lr=args.lr)

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
    torch.manual_seed(1234)
    model = GPT(args, tensor)
    optimizer = Optimizer(model, args, mesh.get_group("data"))
    num_micro_batches = args.global_batch_size // (args.micro_batch_size * (world // tp))
    is_last = dist.get_rank() == world - 1
    if is_last:
        print("> building GPT model ...", flush=True)
    torch.manual_seed(5678 + mesh.get_local_rank("data"))
    started_s = time.perf_counter()
    for iteration in range(1, args.train_iters + 1):
        total = 0.0
        for _ in range(num_micro_batches):
            text = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1))
            loss = model(text[:, :-1], text[:, 1:]) / num_micro_batches
            loss.backward()
            total += loss.item()
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
