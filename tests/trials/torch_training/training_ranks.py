"""What ranks run in the tests of the trainer; a module of its own, because ranks import it by name."""

from costmodels.job import TrainingJob
from costmodels.model_spec import ModelSpec

NUM_STEPS = 3

LLAMA = ModelSpec(
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


def train(place, job, runtime, config, keep=None):
    """Trains some steps and tells their losses and gradient norms."""
    from trials.torch_training.experts import keep_all
    from trials.torch_training.process_group import process_group
    from trials.torch_training.training import Trainer

    with process_group(place, "cpu") as device:
        trainer = Trainer(job, runtime, config, device, keep=keep or keep_all)
        results = [trainer.step() for _ in range(NUM_STEPS)]
        place.tell([(result.loss, result.gradient_norm) for result in results])


def job_of(model, **changes):
    """A small job in single precision."""
    return TrainingJob(model=model, **({"sequence_length": 64, "global_batch_size": 16, "precision": "fp32"} | changes))
