"""Trials inside of a training that goes on: docs/examples/small-gpt with real checkpoints, over gloo."""

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ParallelConfig
from tests.support.built_package import ROOT
from trials.backend import Status
from trials.command.backend import COMMAND_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner.study_file.config import load_study

torch = pytest.importorskip("torch", reason="the training program is torch's")

SIZES = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "64"),
    *("--max-position-embeddings", "32", "--seq-length", "32", "--global-batch-size", "8", "--lr", "1e-2"),
    *("--log-interval", "1", "--train-iters", "100"),
)
PROGRAM_ALONE = ("--micro-batch-size=8", "--exit-interval=12")
PROGRAM = ("pretrain_gpt.py", *SIZES)
TORCHRUN = f"{sysconfig.get_path('scripts')}/torchrun"
MODEL = """
name: small-gpt
source: sizes of the program below
num_layers: 2
hidden_size: 32
vocab_size: 64
tied_embeddings: true
learned_positions: 32
norm: layer
num_heads: 4
num_kv_heads: 4
head_dim: 8
ffn_size: 128
gated_ffn: false
"""
STUDY = f"""
name: training
model: model.yaml
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 32, global_batch_size: 8, precision: fp32}}
trial:
  backend: command
  command: [{TORCHRUN}, "--nproc-per-node={{devices_per_host}}", "--master-port={{master_port}}", pretrain_gpt.py,
            {", ".join(f'"{word}"' for word in SIZES)}, --tensor-model-parallel-size, "{{tp}}",
            --pipeline-model-parallel-size, "{{pp}}", --micro-batch-size, "{{mbs}}",
            --load, "{{checkpoint}}", --save, "{{new_checkpoint}}", --exit-interval, "{{last_step}}"]
  environment: {{OMP_NUM_THREADS: "1"}}
  warmup_steps: 1
  steps: 3
  logs: logs
  training: {{folder: checkpoints}}
storage: sqlite:///study.db
"""


@pytest.fixture
def backend(tmp_path):
    """The backend of a study of the small GPT."""
    shutil.copy(ROOT / "docs" / "examples" / "small-gpt" / "pretrain_gpt.py", tmp_path)
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    found = load_study(tmp_path / "study.yaml").trials.backend
    found.check()
    return found


def losses(log):
    """The losses that a log holds, by their step."""
    found = re.findall(r"iteration +(\d+)/.*lm loss: ([\d.E+-]+)", log)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.slow
def test_a_training_changes_its_layout_and_goes_on_as_if_nothing_had_happened(backend, tmp_path):
    """Trials in three layouts train one model: their losses are those of a training that never stopped, and a trial
    that crashes between them takes nothing away.
    """
    layouts = [
        ParallelConfig(tp=2, mbs=2),
        ParallelConfig(dp=2, mbs=4),
        ParallelConfig(pp=2, mbs=1),  # the program refuses it
        ParallelConfig(tp=2, mbs=8),
    ]
    found = {}
    with RankProcesses(COMMAND_RANKS) as ranks:
        ended = [
            OpenBackend(backend=backend, ranks=ranks).measure(layout, trial_number=number)
            for number, layout in enumerate(layouts)
        ]
    for logs in backend.kept_logs().values():
        found |= losses(Path(logs[0]).read_text(encoding="utf-8"))
    alone = subprocess.run(
        [TORCHRUN, "--nproc-per-node=1", "--standalone", *PROGRAM, "--micro-batch-size=4", "--exit-interval=12"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    undisturbed = losses(alone.stdout)

    assert [each.status for each in ended] == [Status.OK, Status.OK, Status.CRASHED, Status.OK]
    assert len(ended[0].step_times_s) == 3
    assert sorted(undisturbed) == sorted(found) == list(range(1, 13))
    assert found == pytest.approx(undisturbed, rel=1e-4)
    assert found[12] < found[1] - 0.1
    state = backend.in_training()
    assert (state["step"], Path(state["checkpoint"]).name) == (12, "trial-0003")
    assert [each["trial"] for each in state["trials"]] == [0, 1, 3]
    assert dict(ended[3].conditions)["first_step"] == 8.0
    assert dict(step for each in ended for step in each.losses) == found
    assert [len(each.losses) for each in ended] == [4, 4, 0, 4]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="`make frameworks` installs megatron-core")
def test_distributed_checkpoints_of_megatron_core_change_their_layout(tmp_path):
    """A GPT of megatron-core's own layers goes on from its own distributed checkpoints, Adam's states among them: from
    two tensor parallel ranks to two replicas and back, with the losses of a training that never stopped.
    """
    program = ROOT / "tests" / "support" / "programs" / "train_on_megatron_core.py"
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    text = STUDY.replace(", ".join(f'"{word}"' for word in SIZES) + ",", "")
    text = text.replace("pretrain_gpt.py,", f"{program},").replace('--pipeline-model-parallel-size, "{pp}", ', "")
    (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
    backend = load_study(tmp_path / "study.yaml").trials.backend
    backend.check()

    with RankProcesses(COMMAND_RANKS) as ranks:
        opened = OpenBackend(backend=backend, ranks=ranks)
        layouts = (ParallelConfig(tp=2, mbs=2), ParallelConfig(dp=2, mbs=4), ParallelConfig(tp=2, mbs=8))
        ended = [opened.measure(layout, trial_number=number) for number, layout in enumerate(layouts)]
    alone = subprocess.run(
        [TORCHRUN, "--nproc-per-node=1", "--standalone", program, "--tensor-model-parallel-size=1", *PROGRAM_ALONE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert [each.reason for each in ended] == [""] * 3
    assert dict(step for each in ended for step in each.losses) == pytest.approx(losses(alone.stdout), rel=1e-5)
    assert (backend.in_training()["step"], len(backend.in_training()["trials"])) == (12, 3)


@pytest.mark.slow
def test_steps_of_a_command_that_loads_nothing_do_not_count(backend, tmp_path):
    """A program that begins anew each time is measured, and the training stays where it was, with the reason."""
    program = tmp_path / "pretrain_gpt.py"
    text = program.read_text(encoding="utf-8")
    assert text.count("stored.load(args.load) if args.load else 0") == 1
    with RankProcesses(COMMAND_RANKS) as ranks:
        opened = OpenBackend(backend=backend, ranks=ranks)
        first = opened.measure(ParallelConfig(tp=2, mbs=4), trial_number=0)
        program.write_text(
            text.replace("stored.load(args.load) if args.load else 0", "0").replace(
                "args.exit_interval == 0)", "4 == 0)"
            ),
            encoding="utf-8",
        )
        second = opened.measure(ParallelConfig(dp=2, mbs=4), trial_number=1)

    assert (first.status, first.reason, second.status) == (Status.OK, "", Status.OK)
    assert second.step_times_s
    assert "do not count: its checkpoint is of step 4, and the training had done 4 before" in second.reason
    assert backend.in_training()["step"] == 4
