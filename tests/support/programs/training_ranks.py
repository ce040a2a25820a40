"""Functions that ranks run in the tests of the trainer; a separate module, because ranks import it by name."""

import dataclasses

from costmodels.job.model_spec import plain_model
from costmodels.job.training_job import TrainingJob

NUM_STEPS = 3

LLAMA = plain_model(
    name="tiny-llama",
    source="made up",
    num_layers=4,
    hidden_size=64,
    vocab_size=250,
    tied_embeddings=False,
    norm="rms",
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=96,
    gated_ffn=True,
)
GPT = LLAMA.changed(
    name="tiny-gpt",
    norm="layer",
    learned_positions=64,
    tied_embeddings=True,
    num_kv_heads=8,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    gated_ffn=False,
)
MIXTRAL = LLAMA.changed(name="tiny-mixtral", num_experts=4, top_k=2, expert_ffn_size=48, num_dense_layers=1)
QWEN = MIXTRAL.changed(
    name="tiny-qwen", qk_norm=True, qkv_bias=True, num_shared_experts=1, shared_expert_ffn_size=32, num_dense_layers=0
)


def job_of(model, **changes):
    """Build a small job in single precision."""
    return TrainingJob(model=model, **({"sequence_length": 64, "global_batch_size": 8, "precision": "fp32"} | changes))


def train(place, job, runtime, config, capacity_factor=None):
    """Train some steps; report their losses and gradient norms."""
    from trials.torch_training.model.experts import keep_all, keep_up_to

    _train(place, job, runtime, config, keep_all if capacity_factor is None else keep_up_to(capacity_factor))


def train_alone_dropping_like(place, job, runtime, config, capacity_factor):
    """Train in one process, whose experts drop the same tokens as those of the ranks of `config`."""
    from trials.torch_training.model.experts import keep_up_to

    keep_of_rank = keep_up_to(capacity_factor)
    parts = routed_together(job, config)

    def keep(experts, num_experts):
        import torch

        kept = torch.zeros_like(experts, dtype=torch.bool)
        for part in parts:
            kept[part] = keep_of_rank(experts[part], num_experts)
        return kept

    alone = dataclasses.replace(config, pp=1, tp=1, dp=1, cp=1, up=1, vpp=1, ep=1)
    _train(place, job, runtime, alone, keep)


def train_recorded(place, job, runtime, config):
    """Train some steps on recorded groups; report the recordings of all but the first."""
    from trials.torch_training.process_group import process_group
    from trials.torch_training.profiling.recording import BACKEND, register_recorded_backend
    from trials.torch_training.training import Trainer

    recorder = register_recorded_backend()
    with process_group(place, "cpu", backend=BACKEND) as device:
        trainer = Trainer(job, runtime, config, device)
        trainer.step()
        for _ in range(NUM_STEPS):
            recorder.start()
            trainer.step()
            place.tell(recorder.stop())


def routed_together(job, config):
    """Return the tokens of a micro-batch [mbs * sequence_length] that each rank routes, one tensor per rank."""
    import torch

    from trials.torch_training.model.attention import local_positions

    parts = []
    for cp_rank in range(config.cp):
        for up_rank in range(config.up):
            positions = local_positions(
                job.sequence_length, cp=config.cp, up=config.up, cp_rank=cp_rank, up_rank=up_rank
            )
            for own in positions.chunk(config.tp):
                rows = torch.arange(config.mbs)[:, None] * job.sequence_length + own
                parts.append(rows.flatten())
    return parts


def _train(place, job, runtime, config, keep):
    from trials.torch_training.process_group import process_group
    from trials.torch_training.training import Trainer

    with process_group(place, "cpu") as device:
        trainer = Trainer(job, runtime, config, device, keep=keep)
        results = [trainer.step() for _ in range(NUM_STEPS)]
        place.tell([(result.loss, result.gradient_norm) for result in results])
