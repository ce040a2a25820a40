"""Functions that ranks run in the tests of planned torch modules; they are a module so that ranks can import them."""


def perceptron(device="cpu"):
    """Build a perceptron whose two biases are one parameter, its inputs and its loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    with torch.device(device):
        module = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.GELU(), nn.Linear(512, 512))
        module[4].bias = module[2].bias
        module.register_buffer("scale", torch.ones(512))
        inputs = ({"x": torch.randn(16, 512), "y": torch.randn(16, 512)}, 2.0)
    return module, inputs, squared_error


def squared_error(module, batch, factor):
    """Compute the loss of the perceptron."""
    return factor * ((module(batch["x"]) * module.scale - batch["y"]) ** 2).mean()


def planned_step(place, mesh, pins):
    """Report the largest error of loss and gradients under a plan, and this rank's share of the module."""
    import torch
    from torch.distributed.tensor import DTensor

    from trials.torch_training.process_group import process_group
    from tuner.planners import plan_torch
    from tuner.planners.planning import PlannerOptions
    from tuner.planners.sharding.pins import Pin

    module, inputs, loss = perceptron()
    expected = loss(module, *inputs)
    expected.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    options = PlannerOptions(whole_axes=True, pins=tuple(Pin(**pin) for pin in pins))
    described, shapes, _ = perceptron("meta")
    plan = plan_torch(described, *shapes, loss=loss, mesh=mesh, options=options)
    with process_group(place, "cpu"):
        device_mesh = plan.device_mesh("cpu")
        if place.rank:  # rank 0's values count
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
        plan.distribute(module, device_mesh)
        found = loss(module, *plan.distribute_inputs(*inputs, device_mesh=device_mesh))
        found.backward()
        held = {name: (*parameter.placements,) for name, parameter in module.named_parameters()}
        place.tell(
            {
                "error": max(
                    _error(found.full_tensor(), expected),
                    *(_error(each.grad.full_tensor(), grads[name]) for name, each in module.named_parameters()),
                ),
                "local": sum(each.to_local().numel() for each in module.parameters()),
                "whole": sum(each.numel() for each in grads.values()),
                "is_planned": all(held[name] == plan.parameters[name] for name in held),
                "is_tied": module[4].bias is module[2].bias,
                "is_dtensor": isinstance(module.scale, DTensor),
            }
        )


def other_mesh(place):
    """Report the errors for a mesh that is not the plan's, and for a module that is not."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from hardware.io.errors import ConfigError
    from trials.torch_training.process_group import process_group
    from tuner.planners import plan_torch

    module, inputs, loss = perceptron("meta")
    with process_group(place, "cpu"):
        device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        plan = plan_torch(module, *inputs, loss=loss, mesh=device_mesh)
        other = plan_torch(module, *inputs, loss=loss, mesh="model=4")
        for refused in (
            lambda: other.device_mesh("cpu"),
            lambda: other.distribute(module, device_mesh),
            lambda: plan.distribute(nn.Linear(2, 2), device_mesh),
            lambda: plan.distribute_inputs(*inputs[:1], device_mesh=device_mesh),
        ):
            try:
                refused()
            except ConfigError as error:
                place.tell(str(error))


def _error(one, other):
    return float((one.detach() - other.detach()).abs().max() / other.detach().abs().max())
