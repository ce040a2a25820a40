"""Functions that ranks run in the tests of recording; a separate module, because ranks import it by name."""

import contextlib
import threading
import time


@contextlib.contextmanager
def _groups(place):
    """Create a recorded group of all ranks; return its recorder, and a plain gloo group of the same ranks."""
    import torch.distributed as dist

    from trials.torch_training.process_group import process_group
    from trials.torch_training.profiling.recording import BACKEND, register_recorded_backend

    recorder = register_recorded_backend()
    with process_group(place, "cpu", backend=BACKEND):
        yield recorder, dist.new_group(backend="gloo")


def _compare(place, function):
    """Run `function(place, group)` on both groups; report the recording and whether the results are equal."""
    import torch

    with _groups(place) as (recorder, plain):
        expected = function(place, plain)
        unrecorded = function(place, None)
        recorder.start()
        found = function(place, None)
        recording = recorder.stop()
        are_equal = [
            torch.equal(first, second) and torch.equal(first, third)
            for first, second, third in zip(expected, unrecorded, found, strict=True)
        ]
        place.tell((recording, are_equal))


def reductions(place):
    """Run all reducing collectives."""
    _compare(place, _reductions)


def _reductions(place, group):
    import torch
    import torch.distributed as dist

    size = place.world_size
    own = torch.arange(4.0 * size) + 100 * place.rank
    blocking, later, reduced = own.clone(), own.clone(), own.clone()
    dist.all_reduce(blocking, group=group)
    work = dist.all_reduce(later, group=group, async_op=True)
    both = [own.clone(), own[:4].clone()]
    dist.all_reduce_coalesced(both, group=group)
    work.wait()
    work.wait()
    scattered, listed = torch.empty(4), torch.empty(4)
    dist.reduce_scatter_tensor(scattered, own.clone(), group=group)
    dist.reduce_scatter(listed, [piece.clone() for piece in own.split(4)], group=group)
    dist.reduce(reduced, dst=0, group=group)
    return [blocking, later, *both, scattered, listed, *([reduced] if place.rank == 0 else [])]


def exchanges(place):
    """Run all collectives that move data between two ranks."""
    _compare(place, _exchanges)


def _exchanges(place, group):
    import torch
    import torch.distributed as dist

    own = torch.arange(8.0) + 100 * place.rank
    pieces = list(own.split(4))
    gathered, swapped, uneven, received = torch.empty(8), torch.empty(8), torch.empty(3), torch.empty(4)
    listed = [torch.empty(4) for _ in pieces]
    dist.all_gather_into_tensor(gathered, pieces[0], group=group)
    dist.all_gather(listed, pieces[1], group=group)
    dist.all_to_all_single(swapped, own, group=group)
    splits = [1, 2] if place.rank == 0 else [2, 1]
    dist.all_to_all_single(uneven, own[:3], splits, splits, group=group)
    cast = own.clone()
    dist.broadcast(cast, src=0, group=group)
    collected = [torch.empty(4) for _ in pieces] if place.rank == 0 else None
    dist.gather(pieces[0], collected, dst=0, group=group)
    dist.scatter(received, pieces if place.rank == 0 else None, src=0, group=group)
    dist.barrier(group=group)
    return [gathered, *listed, swapped, uneven, cast, *(collected or []), received]


def ring(place):
    """Send from every rank to the next one, then from rank 0 to rank 1."""
    _compare(place, _ring)


def _ring(place, group):
    import torch
    import torch.distributed as dist

    size = place.world_size
    sent, received = torch.full((8,), float(place.rank)), torch.empty(8)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (place.rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, received, (place.rank - 1) % size, group=group),
        ]
    )
    for work in works:
        work.wait()
    if place.rank == 0:
        dist.send(received, 1, group=group, tag=3)
    elif place.rank == 1:
        dist.recv(received, 0, group=group, tag=3)
    return [received]


def functional(place):
    """Run functional collectives and their gradients."""
    _compare(place, _functional)


def _functional(place, group):
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    group = group or dist.group.WORLD
    size = place.world_size
    x = (torch.arange(4.0 * size).reshape(2 * size, 2) + place.rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    scattered = functional.reduce_scatter_tensor_autograd(gathered * gathered, "sum", 0, group)
    swapped = functional.all_to_all_single_autograd(scattered, [2] * size, [2] * size, group)
    summed = functional.all_reduce(swapped.detach(), "sum", group)
    (swapped * swapped).sum().backward()
    return [gathered.detach(), scattered.detach(), swapped.detach(), x.grad, summed + 0]


def redistribute(place):
    """Redistribute a DTensor on a mesh of 2 by n ranks through several placements."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    with _groups(place) as (recorder, _):
        mesh = init_device_mesh("cpu", (2, place.world_size // 2), mesh_dim_names=("outer", "inner"))
        whole = torch.arange(64.0).reshape(8, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        recorder.start()
        rows = sharded.redistribute(placements=[Shard(0), Replicate()])
        full = rows.redistribute(placements=[Replicate(), Replicate()])
        halves = DTensor.from_local(full.to_local() / 2, mesh, [Partial(), Replicate()], run_check=False)
        summed = halves.redistribute(placements=[Replicate(), Replicate()])
        scattered = halves.redistribute(placements=[Shard(0), Replicate()])
        recording = recorder.stop()
        own = whole.chunk(2)[place.rank // (place.world_size // 2)]
        are_equal = [
            torch.equal(full.to_local(), whole),
            torch.equal(summed.to_local(), whole),
            torch.equal(scattered.to_local(), own),
        ]
        place.tell((recording, are_equal))


def sharded(place, name):
    """Train two layers under FSDP2 on one of the groups; report two steady steps, and the gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    with _groups(place) as (recorder, plain):
        group = plain if name == "gloo" else dist.group.WORLD
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(place.rank))

        def step():
            model.zero_grad()
            model(x).square().mean().backward()

        step()
        recordings = []
        for _ in range(2):
            recorder.start()
            step()
            recordings.append(recorder.stop())
        place.tell((recordings, [parameter.grad.full_tensor().tolist() for parameter in model.parameters()]))


def pipelined(place, name):
    """Train two stages of one layer under 1F1B on one of the groups; report two steady steps, and the gradient."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    with _groups(place) as (recorder, plain):
        torch.manual_seed(place.rank)
        layer = torch.nn.Linear(8, 8, bias=False)
        group = plain if name == "gloo" else None
        stage = PipelineStage(layer, place.rank, place.world_size, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(7))

        def step():
            layer.zero_grad()
            if place.rank == 0:
                schedule.step(data)
            else:
                schedule.step(target=data)

        step()  # it also tells the next stage what shapes to expect
        recordings = []
        for _ in range(2):
            recorder.start()
            step()
            recordings.append(recorder.stop())
        place.tell((recordings, layer.weight.grad.tolist()))


def subgroups(place):
    """Create two groups of the same two of three ranks, and send messages inside one."""
    import torch
    import torch.distributed as dist

    with _groups(place) as (recorder, _):
        some, others = dist.new_group([1, 2]), dist.new_group([1, 2])
        recorder.start()
        if place.rank > 0:
            dist.all_reduce(torch.ones(2), group=some)
            dist.all_reduce(torch.ones(2), group=others)
        if place.rank == 1:
            dist.recv(torch.ones(3), group=some, group_src=1)
        if place.rank == 2:
            dist.send(torch.ones(3), group=some, group_dst=0)
        recording = recorder.stop()
        dist.barrier()  # the first rank serves the store in which the others form their groups
        place.tell(recording)


def ways_to_wait(place):
    """Wait for calls at once, by their future, or never."""
    import torch
    import torch.distributed as dist

    with _groups(place) as (recorder, _):
        other = dist.new_group()
        tensors = [torch.ones(2) for _ in range(4)]
        recorder.start()
        dist.all_reduce(tensors[0])
        dist.barrier(group=other)
        dist.all_reduce(tensors[3])
        future = dist.all_reduce(tensors[1], async_op=True).get_future()
        never = dist.all_reduce(tensors[2], async_op=True)
        future.wait()
        recording = recorder.stop()
        never.wait()
        place.tell((recording, [tensor.tolist() for tensor in tensors]))


def what_can_not_be_recorded(place):
    """Receive from any rank, and call from another thread; report the errors."""
    import torch
    import torch.distributed as dist

    with _groups(place) as (recorder, _):
        told = []

        def call(function):
            try:
                function(torch.ones(2))
            except RuntimeError as error:
                told.append(str(error))

        recorder.start()
        call(dist.recv)
        thread = threading.Thread(target=call, args=(dist.all_reduce,))
        thread.start()
        thread.join()
        recorder.stop()
        call(dist.all_reduce)
        place.tell(told)


def times(place):
    """Compute, communicate and sleep; report also the compute time by this thread's own clock."""
    import torch
    import torch.distributed as dist

    with _groups(place) as (recorder, _):
        matrix, large = torch.randn(256, 256), torch.ones(2**21)
        dist.all_reduce(large)
        recorder.start()
        begin_s = time.thread_time()
        for _ in range(10):
            torch.mm(matrix, matrix)
        used_s = time.thread_time() - begin_s
        for _ in range(3):
            dist.all_reduce(large)
        if place.rank == 0:
            time.sleep(0.2)
        dist.barrier()
        place.tell((recorder.stop(), used_s))
