"""Command backends of a small job, whose program only prints."""

import sys
from pathlib import Path

from costmodels.job.model_catalog import load_model
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import read_described_cluster
from trials.command.backend import CommandBackend
from trials.command.log_pattern import find_pattern

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
PROGRAM = Path(__file__).with_name("training_program.py")
CLUSTER = read_described_cluster({"name": "cpu-host", "hosts": 1, "devices_per_host": 2}, Path()).cluster
JOB = TrainingJob(model=load_model("gpt-small.yaml", MODELS), sequence_length=128, global_batch_size=8)


def backend_of(mode="well", *arguments, **changes):
    """Build a backend with three steps after two of warm-up, on two cores by default."""
    command = (
        sys.executable,
        str(PROGRAM),
        "--tensor-model-parallel-size={tp}",
        "--micro-batch-size={mbs}",
        "--train-iters={total_steps}",
        f"--mode={mode}",
        *arguments,
    )
    options = {"arguments": command, "warmup_steps": 2, "steps": 3, "hang_limit_s": 20.0, "cluster": CLUSTER} | changes
    return CommandBackend(job=JOB, directory=Path.cwd(), pattern=find_pattern("megatron"), **options)
