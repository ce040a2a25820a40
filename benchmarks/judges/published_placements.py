"""Predicted phases of RL steps against published ones: one length is fitted to one phase, the others are quoted.

The sources give the longest response but not the mean, so that the mean length of a sequence is fitted to the time of
the old log-probabilities, and the time of generation and of the actor's update are predicted with it. A phase of verl
includes what the prediction leaves out: balancing and padding of batches, resharding, and sleep and wake-up of engines.

Sources: recipe/one_step_off_policy/README.md and recipe/one_step_off_policy/dapo_7b_math_megatron_4_12.sh of verl
(Qwen2.5-Math-7B, DAPO, 16 H20, vLLM and Megatron), and docs/advance/fully_async.md (32 to 128 H20, vLLM and FSDP2).

    python -m benchmarks.judges.published_placements
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from costmodels.job.model_catalog import find_model
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping
from tuner.place.generation import generation_layouts
from tuner.place.layouts import Layout, layouts_of
from tuner.place.workload import GENERATE, INFER, TRAIN, Generation, Module

PROMPTS, MINI_BATCH, PROMPT_TOKENS, HEADROOM = 512, 32, 160, 0.08
"""Prompts per step and of one optimizer step, as the sources say; tokens of a prompt and free memory are assumed."""

SEQUENCES_ALIKE = 128
"""Multiple of the fitted length: lengths between differ by less than the sources' digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One row of a source: times of the phases of a synchronous step on shared devices [s].

    Attributes:
        engine: Training engine.
        devices: Number of H20.
        responses: Responses to each prompt.
        longest: Longest response in tokens.
        generate_s: Time of generation.
        logprobs_s: Time of the old log-probabilities.
        update_s: Time of the actor's update.
        degrees: Degrees that the source names.
    """

    engine: str
    devices: int
    responses: int
    longest: int
    generate_s: float
    logprobs_s: float
    update_s: float
    degrees: tuple[tuple[str, int], ...] = ()


ROWS = (
    Published(
        engine="Megatron",
        devices=16,
        responses=12,
        longest=8192,
        generate_s=162,
        logprobs_s=119,
        update_s=344,
        degrees=(("tp", 2), ("pp", 2)),
    ),
    Published(engine="FSDP2", devices=32, responses=16, longest=28672, generate_s=357, logprobs_s=108, update_s=314),
    Published(engine="FSDP2", devices=64, responses=16, longest=28672, generate_s=151, logprobs_s=70, update_s=133),
    Published(engine="FSDP2", devices=128, responses=16, longest=28672, generate_s=178, logprobs_s=54, update_s=114),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row beside its prediction.

    Attributes:
        row: Published times.
        mean_tokens: Fitted mean length of a sequence, its prompt included.
        logprobs_s: Predicted time of the old log-probabilities, to which the length was fitted [s].
        generate_s: Predicted time of generation [s].
        update_s: Predicted time of the actor's update [s].
    """

    row: Published
    mean_tokens: int
    logprobs_s: float
    generate_s: float
    update_s: float


def _module(row: Published, job: str, tokens: int) -> Module:
    sequences = PROMPTS * row.responses
    steps = PROMPTS // MINI_BATCH
    batch = {TRAIN: sequences // steps, INFER: sequences, GENERATE: PROMPTS}[job]
    made = Generation(
        prompts=PROMPTS,
        responses_per_prompt=row.responses,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=tokens - PROMPT_TOKENS,
        longest_response_tokens=row.longest,
    )
    return Module(
        name=job,
        job=job,
        training=TrainingJob(
            model=find_model("qwen2.5-7b"),
            sequence_length=PROMPT_TOKENS if job == GENERATE else tokens,
            global_batch_size=batch,
        ),
        optimizer_steps=steps if job == TRAIN else 1,
        generation=made if job == GENERATE else None,
        runtime=find_runtime("megatron-core"),
        # the source's script generates with tp 2 and without stages
        layout=(("tp", 2), ("pp", 1)) if job == GENERATE and row.degrees else row.degrees if job != GENERATE else (),
        devices=None,
        shares=None,
    )


def _fastest(row: Published, job: str, tokens: int, cluster: Cluster) -> Layout:
    module = _module(row, job, tokens)
    found = (
        generation_layouts(module, cluster, HEADROOM) if job == GENERATE else layouts_of((module,), cluster, HEADROOM)
    )
    return found[0]


def compare(row: Published) -> Compared:
    """Fit the mean length of a row, and predict its other phases."""
    cluster = cluster_from_mapping({"device": "H20", "hosts": row.devices // 8}, Path())
    lengths = range(2 * SEQUENCES_ALIKE, row.longest // 2, SEQUENCES_ALIKE)
    times_s = {tokens: _fastest(row, INFER, tokens, cluster).times_s[0] for tokens in lengths}
    tokens = min(times_s, key=lambda one: abs(times_s[one] - row.logprobs_s))
    return Compared(
        row=row,
        mean_tokens=tokens,
        logprobs_s=times_s[tokens],
        generate_s=_fastest(row, GENERATE, tokens, cluster).times_s[0],
        update_s=_fastest(row, TRAIN, tokens, cluster).times_s[0],
    )


def main() -> None:
    """Print the rows of the sources beside their predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="number of rows")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    compared = [compare(row) for row in ROWS[: given.rows]]
    if given.json:
        print(json.dumps({"rows": [asdict(one) for one in compared]}, indent=2))
        return
    print(f"{'engine':>9} {'H20':>4} {'fitted tokens':>13} {'generate [s]':>20} {'update [s]':>20}")
    for one in compared:
        row = one.row
        phases = [
            f"{published:.0f} -> {predicted:.0f} ({predicted / published - 1:+.0%})"
            for published, predicted in ((row.generate_s, one.generate_s), (row.update_s, one.update_s))
        ]
        print(f"{row.engine:>9} {row.devices:>4} {one.mean_tokens:>13} {phases[0]:>20} {phases[1]:>20}")


if __name__ == "__main__":
    main()
