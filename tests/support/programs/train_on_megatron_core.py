"""Training program on megatron-core's own layers and distributed checkpoints, over gloo on CPUs.

It trains a small GPT with tensor and data parallelism, and loads and saves as Megatron-LM does: sharded tensors of
model and optimizer in `iter_N`, with the number of the latest beside them (megatron/training/checkpointing.py).
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

SEQUENCE, VOCABULARY, BATCH = 16, 64, 8
torch.cuda.current_device = lambda: "cpu"  # megatron-core makes its buffers where this says
torch.cuda.synchronize = lambda: None  # it waits for the device before it saves
LATEST = "latest_checkpointed_iteration.txt"


def built(args):
    """The model and its Adam."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for parameter in model.parameters():  # Adam makes its states at the first step, and a checkpoint has to fill them
        states = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {"step": torch.tensor(0.0), **states}
    return model, adam


def sharded(model, adam):
    """The tensors of the whole job, of which each rank has its part.

    This is what megatron-core's FP32Optimizer.sharded_state_dict does; its constructor needs a GPU.
    """
    weights, states = model.sharded_state_dict(prefix="model."), adam.state_dict()
    steps = {state.pop("step") for state in states["state"].values()}
    parameters = get_param_id_to_sharded_param_map(weights, model.parameters())
    optim_state_to_sharding_state(states, parameters, exclude_keys="step")
    states["state"]["common_step"] = max(steps)
    return {"model": weights, "optimizer": states}


def load(folder, model, adam):
    """Load the latest checkpoint, and return its iteration; 0 if there is none."""
    if not (folder / LATEST).exists():
        return 0
    iteration = int((folder / LATEST).read_text(encoding="utf-8"))
    found = dist_checkpointing.load(
        sharded(model, adam), str(folder / f"iter_{iteration:07}"), strict=StrictHandling.RAISE_ALL
    )
    model.load_state_dict({name.removeprefix("model."): value for name, value in found["model"].items()})
    step = found["optimizer"]["state"].pop("common_step")
    for state in found["optimizer"]["state"].values():
        state["step"] = step.clone()
    adam.load_state_dict(found["optimizer"])
    return iteration


def save(folder, model, adam, iteration):
    """Save, and name the checkpoint as the latest once it is whole."""
    place = folder / f"iter_{iteration:07}"
    if dist.get_rank() == 0:
        place.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded(model, adam), str(place))
    if dist.get_rank() == 0:
        (folder / LATEST).write_text(str(iteration), encoding="utf-8")


def train_step(model, adam, iteration, args):
    """Train on the iteration's batch, of which each replica has its share, and return the mean loss."""
    generator = torch.Generator().manual_seed(iteration % 4)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    replicas, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    own = tokens.chunk(replicas)[rank]
    adam.zero_grad()
    positions = torch.arange(SEQUENCE).expand(len(own), -1)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    total = torch.zeros(())
    for part in range(0, len(own), args.micro_batch_size):
        rows = slice(part, part + args.micro_batch_size)
        losses = model(own[rows, :-1], positions[rows], mask, labels=own[rows, 1:])
        (losses.sum() / tokens[:, 1:].numel()).backward()
        total += losses.detach().sum() / tokens[:, 1:].numel()
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    dist.all_reduce(total, group=group)
    adam.step()
    return total.item()


def main():
    """Train from the latest checkpoint to the last step, and save."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("tensor-model-parallel-size", "micro-batch-size", "exit-interval"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("load", "save"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(0)
    model, adam = built(args)
    done = load(args.load, model, adam) if args.load else 0
    for iteration in range(done + 1, args.exit_interval + 1):
        begun_s = time.perf_counter()
        loss = train_step(model, adam, iteration, args)
        if dist.get_rank() == 0:
            timed = f"elapsed time per iteration (ms): {1e3 * (time.perf_counter() - begun_s):.1f}"
            sys.stdout.write(f" iteration {iteration:8d}/ 100 | {timed} | lm loss: {loss:.6E} |\n")
            sys.stdout.flush()
    if args.save:
        save(args.save, model, adam, args.exit_interval)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
