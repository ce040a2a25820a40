"""Count trials that are refused or run out of memory, with and without rehearsals, on a cluster that is a stand-in.

    python -m benchmarks.search.rehearsed_search --answers FILE [--seeds 3] [--trials 30] [--account] [--json]

The program is Megatron-LM itself (tests/support/rehearsal/pretrain.py on megatron-core's wheel): 4 layers of 12,288
hidden values on 8 H100. Each candidate of the study is rehearsed once, and its answer is kept in FILE. The cluster is a
stand-in:

- it refuses what Megatron-LM refuses in the rehearsal. With --account the command has the flags that account for
  embedding and loss in the pipeline split, of which the study knows nothing, so that some depths cannot be split.
- a candidate needs what was rehearsed and what the device adds to it by the runtime's profile, times a factor of the
  cluster (2% in one standard deviation) and one of its own (1%). It runs out of memory beyond the device's, and reports
  its peak otherwise.
- a step takes what a function of the layout says, which prefers little parallelism of tensors and pipelines and large
  micro-batches, where memory is short, and 1% of noise.

With --stated-ffn the study's model is a file written by hand, in which this width differs from the program's, so that
its predictions are of another model. Rehearsals run the program.

So the memory of the stand-in is that of the rehearsal but for its errors: what is shown is what the search makes of
it, and not how near rehearsals are to devices (docs/rehearsal.md says that).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.timing import benchmark_parser, count_at_least, publish, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from costmodels.step.memory.peak import stage_memory
from hardware.device import Device
from tests.support.rehearsal.megatron_study import ENGINE
from trials.backend import Observation, Status
from tuner.forecast.planned_candidates import prepare
from tuner.forecast.prepared import Prepared
from tuner.rehearsal.candidates import Candidate, CandidateAnswer, by_program, candidate_of, whole_answers
from tuner.rehearsal.memory import rehearsed_memory
from tuner.rehearsal.run import rehearse
from tuner.run.ledger import Ledger
from tuner.run.loop import run_study
from tuner.run.rehearsing import Rehearsals
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

NEAR = 0.05
"""Slowdown within which a trial counts as having found the best."""
CLUSTER_ERROR, OWN_ERROR, STEP_ERROR = 0.02, 0.01, 0.01
SMALL_BATCH = 0.12
"""Share by which a micro-batch of one sequence is slower than one of very many."""
LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY, SEQUENCE, BATCH = 4, 12288, 96, 8, 36864, 32000, 4096, 64
MODEL = f"""\
name: four-layers
source: made up, as wide as a model of 175 billion parameters
num_layers: {LAYERS}
hidden_size: {HIDDEN}
vocab_size: {VOCABULARY}
tied_embeddings: false
norm: rms
num_heads: {HEADS}
num_kv_heads: {GROUPS}
head_dim: {HIDDEN // HEADS}
ffn_size: {{ffn}}
gated_ffn: true
"""
FLAGS = (
    *("--num-layers", LAYERS, "--hidden-size", HIDDEN, "--ffn-hidden-size", FFN, "--num-attention-heads", HEADS),
    *("--group-query-attention", "--num-query-groups", GROUPS, "--seq-length", SEQUENCE),
    *("--max-position-embeddings", SEQUENCE, "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights", "--bf16"),
    *("--use-distributed-optimizer", "--train-iters", 5, "--lr", "1e-4", "--tokenizer-type", "NullTokenizer"),
    *("--mock-data", "--vocab-size", VOCABULARY, "--no-gradient-accumulation-fusion"),
)
ACCOUNT = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
STUDY = """\
name: rehearsed-search
model: model.yaml
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: {sequence}, global_batch_size: {batch}, precision: bf16, zero_stage: 1}}
runtime: megatron-core
space: {{cp: [1], up: [1], vpp: [1], mbs: [1, 2, 4, 8, 16], assignment: []}}
current: {{tp: 8, mbs: 1}}
search: {{max_trials: {trials}, seed: {seed}, rehearse: {rehearse}}}
trial:
  backend: command
  command: [{words}]
  flags: megatron
  directory: "."
  environment: {{PYTHONPATH: "{engine}"}}
  log: megatron
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each seed and arm, and the sums."""
    parser = benchmark_parser("search.rehearsed_search", __doc__)
    parser.add_argument("--answers", type=Path, required=True, help="file that keeps the answers of rehearsals")
    parser.add_argument("--seeds", type=count_at_least(1), default=3)
    parser.add_argument("--trials", type=count_at_least(1), default=30)
    parser.add_argument("--account", action="store_true", help="with flags of which the study knows nothing")
    parser.add_argument("--stated-ffn", type=count_at_least(1), default=FFN, help="ffn_size of the study's model")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        # the folder's name is part of what is run, so it stays the same
        folder = given.answers.resolve().parent / "rehearsed-search"
        folder.mkdir(exist_ok=True)
        rows = [
            _search(folder, Path(scratch), given, seed=seed, rehearse=arm)
            for seed in range(given.seeds)
            for arm in ("off", "leaders")
        ]
    sums = [_sum([row for row in rows if row["rehearse"] == arm]) for arm in ("off", "leaders")]
    publish([*rows, *sums], as_json=given.json)
    return 0


@dataclass
class Answers:
    """Answers of rehearsals, each made once.

    Attributes:
        file: File that keeps them.
        known: Answers by the keys of the candidates.
    """

    file: Path
    known: dict[str, CandidateAnswer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file."""
        if self.file.is_file():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                answer = CandidateAnswer.from_json(json.loads(line))
                assert answer is not None, "we wrote it"
                self.known[answer.key] = answer

    def of(self, candidates: Sequence[Candidate], device: Device) -> list[CandidateAnswer]:
        """Return the answers of candidates, after rehearsing those that are not known."""
        missing = [one for one in {each.key: each for each in candidates}.values() if one.key not in self.known]
        for group in by_program(missing):
            cases = [case for candidate in group for case in candidate.cases]
            answers = rehearse(cases, device=device, limit_s=7200, environment=os.environ)
            for number, answer in enumerate(whole_answers(group, answers), start=1):
                self.known[answer.key] = answer
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(answer.as_json()) + "\n")
                tell(f"rehearsed {number} of {len(group)}: {answer.verdict}")
        return [self.known[candidate.key] for candidate in candidates]


@dataclass
class Known:
    """Rehearsals whose answers are known already, as a run's own process would give them.

    Attributes:
        answers: All answers.
        candidates: Candidates that are asked for.
        device: Device that the program believes to be on.
        left: Keys without an answer.
        is_over: Whether all are answered.
    """

    answers: Answers
    candidates: Sequence[Candidate]
    device: Device
    left: list[str] = field(default_factory=list)
    is_over: bool = False

    def read(self, timeout_s: float) -> list[dict[str, Any]]:  # noqa: ARG002 # the contract's
        """Return all answers."""
        self.left, self.is_over = [candidate.key for candidate in self.candidates], True
        return [answer.as_json() for answer in self.answers.of(self.candidates, self.device)]

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Cluster:
    """Cluster that is a stand-in: an executor whose trials end at once.

    Attributes:
        prepared: Study.
        truth: Answer of each configuration.
        seed: Seed of its errors.
        waiting: Trials that were submitted.
        seen: Status and step time of each trial, in order.
    """

    prepared: Prepared
    truth: Mapping[ParallelConfig, CandidateAnswer]
    seed: int
    waiting: list[tuple[int, ParallelConfig]] = field(default_factory=list)
    seen: list[tuple[Status, float]] = field(default_factory=list)
    slots_note: str = ""
    reported: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    queued: tuple[int, ...] = ()

    def __enter__(self) -> Cluster:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    @property
    def num_free_slots(self) -> int:
        """One slot."""
        return 1 - len(self.waiting)

    @property
    def pending(self) -> tuple[int, ...]:
        """Trials that were not polled."""
        return tuple(number for number, _ in self.waiting)

    def submit(self, trial_number: int, config: ParallelConfig, reduction: Reduction | None, /) -> None:
        """Take a trial."""
        assert reduction is None, "the study has no proxies"
        self.waiting.append((trial_number, config))

    def stop(self, trial_number: int, reason: str, /) -> None:
        """Fail: nothing is reported that could be stopped."""
        raise AssertionError((trial_number, reason))

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """Fail: there is no budget of time."""
        raise AssertionError((trial_number, reason))

    def poll(self, timeout_s: float, /) -> list[tuple[int, Observation]]:  # noqa: ARG002 # the contract's
        """End the trial that waits."""
        ended = [(number, self.measure(config)) for number, config in self.waiting]
        self.waiting = []
        self.seen += [(found.status, found.step_time_s or math.inf) for _, found in ended]
        return ended

    def measure(self, config: ParallelConfig) -> Observation:
        """Return what a trial of a configuration observes."""
        answer = self.truth[config]
        if answer.verdict != "accepted":
            return Observation(status=Status.CRASHED, reason=answer.in_words, origin="synthetic")
        memory = rehearsed_memory(self.prepared.problem.setting, config, answer.peaks_bytes)
        assert memory is not None, "an accepted candidate has peaks"
        degrees = [config.pp, config.tp, config.dp, config.vpp, config.mbs, config.recompute == "full"]
        own = np.random.default_rng([self.seed, *map(int, degrees)])
        common = np.random.default_rng([self.seed, 77]).normal(0, CLUSTER_ERROR)
        needed = memory.needed_bytes * math.exp(common + own.normal(0, OWN_ERROR))
        if needed > memory.capacity_bytes:
            return Observation(status=Status.OUT_OF_MEMORY, reason="CUDA out of memory", origin="synthetic")
        times = step_s(config) * np.exp(own.normal(0, STEP_ERROR, 4))
        # the log reports reserved memory, which leaves out the context and the buffers of NCCL
        outside = float(stage_memory(self.prepared.problem.setting, config).parts_bytes["overhead"][memory.stage])
        return Observation(
            status=Status.OK,
            step_times_s=tuple(times.tolist()),
            peak_memory_bytes=round(needed - outside),
            origin="synthetic",
        )


def step_s(config: ParallelConfig) -> float:
    """Return the step time of the stand-in [s]: bubbles, a share for each further rank of tp, and small products."""
    micro_batches = BATCH // (config.dp * config.mbs)
    bubble = 1 + (config.pp - 1) / (micro_batches * config.vpp)
    beside = 1 + 0.02 * (config.tp - 1)
    return 10.0 * bubble * beside * (1 + SMALL_BATCH / config.mbs)


def _write(folder: Path, given: Any, *, seed: int, rehearse: str) -> Path:
    own = Path(__file__).resolve().parents[2] / "tests" / "support" / "rehearsal" / "pretrain.py"
    target = folder / "pretrain.py"
    if not target.is_file():
        target.write_text(own.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "model.yaml").write_text(MODEL.format(ffn=given.stated_ffn), encoding="utf-8")
    words = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", "pretrain.py", *FLAGS)
    words = (*words, *(ACCOUNT if given.account else ()), "--global-batch-size", BATCH, "{flags}")
    text = STUDY.format(
        words=", ".join(f'"{word}"' for word in words),
        engine=ENGINE,
        sequence=SEQUENCE,
        batch=BATCH,
        trials=given.trials,
        seed=seed,
        rehearse=rehearse,
    )
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _search(folder: Path, scratch: Path, given: Any, *, seed: int, rehearse: str) -> dict[str, Any]:
    """Run one search, and count its trials."""
    database = scratch / f"{seed}-{rehearse}.db"
    request = load_study(_write(folder, given, seed=seed, rehearse=rehearse), storage=f"sqlite:///{database}")
    prepared = prepare(request, StoredStudies(request.storage), runs=True)
    grid, device = prepared.candidates.space.grid, prepared.problem.cluster.devices[0]
    configs = [prepared.problem.with_knobs(grid.config(position)) for position in range(len(grid))]
    answers = Answers(given.answers)
    every = [candidate_of(prepared.backend, config, device, os.environ) for config in configs]
    truth = dict(zip(configs, answers.of(every, device), strict=True))
    cluster = Cluster(prepared=prepared, truth=truth, seed=seed)

    def start(candidates: Sequence[Candidate], **_: Any) -> Known:
        return Known(answers=answers, candidates=candidates, device=device)

    def rehearsals_of(ledger: Ledger) -> Rehearsals:
        return Rehearsals(ledger, start=start)

    fits = {config: cluster.measure(config) for config in configs}
    best_s = min(step_s(config) for config, found in fits.items() if found.status is Status.OK)
    result = run_study(replace(prepared), executor=cluster, on_progress=lambda _: None, rehearsals_of=rehearsals_of)
    tell(f"seed {seed}, rehearse {rehearse}: {[status.value for status, _ in cluster.seen]}")
    near = [number for number, (_, time_s) in enumerate(cluster.seen, start=1) if time_s <= (1 + NEAR) * best_s]
    return {
        "seed": seed,
        "rehearse": rehearse,
        "candidates": len(configs),
        "refused_of_all": sum(found.status is Status.CRASHED for found in fits.values()),
        "too_large_of_all": sum(found.status is Status.OUT_OF_MEMORY for found in fits.values()),
        "trials": len(cluster.seen),
        "refused": sum(status is Status.CRASHED for status, _ in cluster.seen),
        "out_of_memory": sum(status is Status.OUT_OF_MEMORY for status, _ in cluster.seen),
        "to_5_percent": near[0] if near else None,
        "slowdown": min(time_s for _, time_s in cluster.seen) / best_s - 1,
        "stop_reason": result.stop_reason.value,
    }


def _sum(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counted = {name: sum(row[name] for row in rows) for name in ("trials", "refused", "out_of_memory")}
    reached = sorted(row["to_5_percent"] or math.inf for row in rows)
    first = {name: rows[0][name] for name in ("rehearse", "candidates")}
    of_all = {name: sum(row[name] for row in rows) / len(rows) for name in ("refused_of_all", "too_large_of_all")}
    slowdown = max(row["slowdown"] for row in rows)
    middle = reached[len(reached) // 2]
    last = {"to_5_percent": middle, "slowdown": slowdown, "stop_reason": ""}
    return {"seed": "all", **first, **of_all, **counted, **last}


if __name__ == "__main__":
    sys.exit(main())
