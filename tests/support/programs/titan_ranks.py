"""Functions that ranks run in the tests of planned steps in torchtitan's Trainer; ranks import them from here.

torchtitan 0.3 trains on accelerators alone, and with a torch later than 2.13. `stand_in` gives it this machine's
processors for an accelerator, and no timeout of its own; nothing else of it is changed.
"""


def stand_in():
    """Let torchtitan take processors for its accelerator; to be called before it is imported."""
    import types

    import torch

    class Processors(types.ModuleType):
        """Module of a device, with the answers that torch.cpu lacks."""

        def __getattr__(self, name):
            return getattr(torch.cpu, name)

    processors = Processors("processors")
    processors.current_device = lambda: 0
    processors.get_device_name = lambda _: "processor"
    processors.get_device_properties = lambda _: types.SimpleNamespace(total_memory=2**34)
    processors.memory_stats = lambda _: {}
    processors.reset_peak_memory_stats = processors.empty_cache = lambda: None
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: processors
    torch.distributed.set_timeout = lambda *_: None


def fill(_, parts, __):
    """Give a model the weights of one process, whatever its layouts; a `post_optimizer_build_fn` of torchtitan."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parts[0].parameters():
            whole = torch.randn(parameter.shape, generator=drawn) * 0.02
            is_dealt = isinstance(parameter, DTensor)
            value = distribute_tensor(whole, parameter.device_mesh, parameter.placements) if is_dealt else whole
            parameter.copy_(value)


def train(place, folder, mesh, seeds):
    """Report losses and norms of gradients that the Trainer logs for each seed of a plan, and what each call sends.

    One rank trains the whole batch without a plan.
    """
    import os
    import sys
    from dataclasses import replace
    from pathlib import Path

    stand_in()
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(place.world_size)}
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs/examples/torchtitan"))
    import titan_llama
    from torchtitan.trainer import Trainer

    from costmodels.sharding.exports.plan_file import plan_text
    from tests.support.programs.parallel_ranks import planned
    from tests.support.programs.recorded_ranks import _groups
    from tests.support.programs.trainer_ranks import expected_traffic
    from trials.torch_training.planned.traffic import recorded_traffic
    from tuner import for_titan, load_plan, titan_step

    class Recorded(Trainer):
        """Trainer that keeps what it logs and sends."""

        def forward_backward_step(self, **given):
            recorder.start()
            found = super().forward_backward_step(**given)
            sent.append(dict(recorded_traffic(recorder.stop())))
            return found

    def config():
        found = titan_llama.config()
        found.training.local_batch_size = 2 * titan_llama.ROWS // place.world_size
        return replace(found, model_spec=replace(found.model_spec, post_optimizer_build_fn=fill))

    with _groups(place) as (recorder, _):
        for seed in seeds:
            sent, logged, expected, made = [], [], {}, config()
            if mesh:
                module, (batch,), loss = titan_step(config(), num_ranks=place.world_size)
                plan = planned(module, (batch,), loss, mesh, seed)
                expected = expected_traffic(plan, place.rank, batch)
                file = Path(f"plan-{place.rank}.json")
                file.write_text(plan_text(plan.planned.plan, by_hand=False))
                made = for_titan(made, load_plan(file))
            else:
                made.parallelism.spmd_backend = "partial_dtensor"  # the one that takes a single rank
            trainer = Recorded(made)
            trainer.metrics_processor.log = lambda *given, logged=logged, **_: logged.append(given)
            trainer.train()
            trainer.close()
            losses, norms = [given[1] for given in logged], [given[3] for given in logged]
            place.tell({"losses": losses, "norms": norms, "sent": sent[1:], "expected": expected})
