"""Functions that ranks run in the tests of exported placements; a separate module, because ranks import it by name."""


def distribute(place, mesh, shape, placements):
    """Distribute a tensor of element numbers; report this rank's part, and the tensor gathered again."""
    import torch
    from torch.distributed import tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        known = {"Shard": dtensor.Shard, "Replicate": dtensor.Replicate, "Partial": dtensor.Partial}
        made = []
        for each in placements:
            name, _, arguments = each.rstrip(")").partition("(")
            made.append(known[name](*map(int, filter(None, arguments.split(",")))))
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        found = dtensor.distribute_tensor(whole, device_mesh, made)
        place.tell((tuple(found.to_local().shape), found.to_local().flatten().tolist()))
        place.tell(bool((found.full_tensor() == whole).all()))
