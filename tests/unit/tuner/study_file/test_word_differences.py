"""The first trial of a study starts the words of its script, and every difference has a reason."""

import json

import pytest

from tuner.imports.megatron_command import LEFT_OUT
from tuner.imports.trial_words import DEVICES, HOSTS, MEETING

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope --vocab-size 32000 "
    "--micro-batch-size 1 --global-batch-size 512 --bf16 --tensor-model-parallel-size 2 --mock-data"
)
MOE = (
    f"{MODEL} --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--moe-grouped-gemm"
)
SLURM = "#!/bin/bash\n#SBATCH --nodes=8\n#SBATCH --gpus-per-node=8\n"
LAUNCH = "--nproc_per_node 8 --nnodes 8 --node_rank $SLURM_NODEID --master_addr h --master_port 1"
RENDEZVOUS = [
    ("--node_rank $SLURM_NODEID", "--node_rank {host_rank}", HOSTS),
    ("--master_addr h", "--master_addr {master_address}", MEETING),
    ("--master_port 1", "--master_port {master_port}", MEETING),
]
LOG = ("", "--log-interval 1", "each step of a trial is logged")
PORT = ("", "--master-port={master_port}", MEETING)
CASES = {
    "containers and numactl": (
        f"{SLURM}srun singularity exec --nv /img.sif numactl --membind=0 torchrun {LAUNCH} pretrain_gpt.py {MODEL}",
        [*RENDEZVOUS, LOG],
    ),
    "precision of the optimizer": (
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --use-distributed-optimizer "
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --no-gradient-accumulation-fusion --log-interval 1",
        [PORT],
    ),
    "dispatcher": (
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {MOE} --moe-token-dispatcher-type flex --moe-enable-deepep "
        "--sequence-parallel --use-distributed-optimizer --log-interval 10 --save /ck",
        [PORT, ("--log-interval 10", *LOG[1:]), ("--save /ck", "", LEFT_OUT["--save"])],
    ),
    "variables": (
        "export CUDA_DEVICE_MAX_CONNECTIONS=32 MASTER_ADDR=h NCCL_IB_HCA=mlx5\n"
        f"torchrun --standalone --nproc_per_node gpu --nnodes 1 pretrain_gpt.py {MODEL} --log-interval 1 "
        "--context-parallel-size 2 --cp-comm-type allgather",
        [("MASTER_ADDR", "MASTER_ADDR={master_address}", MEETING)],
    ),
    "mpirun": (
        f"{SLURM}#SBATCH --ntasks-per-node=8\nmpirun -np 64 --npernode 8 -bind-to none python pretrain_gpt.py {MODEL}",
        [LOG],
    ),
    "variables of mpirun": (
        f"{SLURM}#SBATCH --ntasks-per-node=8\nmpirun -np 64 -x MASTER_ADDR=h -x NCCL_IB_TC=106 -x MASTER_PORT=1 python "
        f"pretrain_gpt.py {MODEL} --log-interval 1",
        [
            ("-x MASTER_ADDR=h", "-x MASTER_ADDR={master_address}", MEETING),
            ("-x MASTER_PORT=1", "-x MASTER_PORT={master_port}", MEETING),
        ],
    ),
    "batches that grow": (
        f"torchrun --standalone --nproc_per_node 8 pretrain_gpt.py {MODEL} --log-interval 1 "
        '--step-batch-size-schedule "0:16 2B:512"',
        [("--step-batch-size-schedule 0:16 2B:512", "", LEFT_OUT["--step-batch-size-schedule"])],
    ),
    "srun": (
        f"{SLURM}#SBATCH --job-name=x\nsrun --ntasks-per-node=8 --cpu-bind=cores python -u pretrain_gpt.py {MODEL}",
        [LOG, ("--job-name", "", "the job of each trial has its own")],
    ),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_the_first_trial_starts_the_words_of_the_script(meshtune, tmp_path, text, expected):
    """Wrappers, dispatchers, number formats and variables stay; what a trial has of its own is told with its reason."""
    (tmp_path / "train.sh").write_text(f"{text}\n", encoding="utf-8")
    options = f"--from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100 --devices-per-host 8"
    ignored = ["--ignore-flags", "main-grads-dtype"] if "main-grads" in text else []

    done = meshtune("init", *options.split(), *ignored, "--json")

    assert done.status == 0, done.err
    told = [(one["script"], one["trial"], one["why"]) for one in json.loads(done.out)["differences"]]
    assert sorted(told) == sorted(expected)


def test_the_words_end_the_answer(meshtune, tmp_path):
    """People see each difference, or that there is none."""
    text = f"torchrun --standalone --nproc_per_node 8 pretrain_gpt.py {MODEL} --log-interval 1\n"
    (tmp_path / "train.sh").write_text(text, encoding="utf-8")

    done = meshtune(*f"init --from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100".split())

    assert "Differences between the words of your script and of the first trial: none" in done.out
    assert DEVICES not in done.out


@pytest.mark.parametrize(("value", "is_asked"), [("$GPUS", True), ("gpu", False)])
def test_unknown_devices_are_asked_for_where_the_hosts_are_known(meshtune, tmp_path, value, is_asked):
    """A script that counts one device more on its first host has another cluster than the catalog's hosts."""
    script = f"GPUS=3\nif [ $1 = 0 ]; then ((GPUS++)); fi\ntorchrun --nproc_per_node {value} --nnodes 2 "
    (tmp_path / "train.sh").write_text(f"{script} pretrain_gpt.py {MODEL}\n", encoding="utf-8")

    done = meshtune(*f"init --from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100".split())

    assert ("--devices-per-host N" in done.err) == is_asked
    assert (done.status == 0) != is_asked


ADDED = ["--node-rank={host_rank}", "--master-addr={master_address}", "--master-port={master_port}"]


@pytest.mark.parametrize(
    ("launch", "removed", "added"),
    [
        ("--nproc_per_node 8 --nnodes 1", [], ADDED),
        ("--nproc_per_node 8", [], ["--nnodes=16", *ADDED]),
        ("--standalone --nproc_per_node 8", ["--standalone"], ["--nnodes=16", *ADDED]),
        ("--nproc_per_node 8 --nnodes 1 --rdzv-backend c10d --rdzv-endpoint h:1", [], []),
    ],
)
def test_a_script_of_one_host_meets_on_several(meshtune, tmp_path, launch, removed, added):
    """No host of a study with more hosts than the script trains alone: torchrun's default rank is 0."""
    script = f"torchrun {launch} pretrain_gpt.py {MODEL} --log-interval 1\n"
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")
    options = f"--from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100 --hosts 16"

    done = meshtune("init", *options.split(), "--json")

    assert done.status == 0, done.err
    told = json.loads(done.out)["differences"]
    assert [one["trial"] for one in told if not one["script"]] == added
    assert [one["script"] for one in told if not one["trial"]] == removed
    assert {one["why"] for one in told} <= {HOSTS, MEETING}


def test_unknown_words_behind_a_switch_that_is_left_out_stay(meshtune, tmp_path):
    """`$MORE` may hold any flags, so that a command without them would be another one."""
    script = (
        f"if [ -f /ck/latest ]; then MORE='--load /a'; else MORE='--no-load-rng'; fi\n"
        f"torchrun --standalone --nproc_per_node 8 pretrain_gpt.py {MODEL} --use-checkpoint-args $MORE --save $CK\n"
    )
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")
    options = f"--from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100 --hosts 1"

    done = meshtune("init", *options.split(), "--ignore-flags", "use-checkpoint-args", "--json")

    assert done.status == 0, done.err
    study = (tmp_path / "s.yaml").read_text(encoding="utf-8")
    assert "trial: {backend: simulated}" in study
    assert "$MORE" in study


def test_a_command_whose_words_do_not_say_the_chunks_is_not_exchanged(meshtune, tmp_path):
    """What an option answers stands in no word, so that nothing can be exchanged in place."""
    flags = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3"
    script = f"torchrun --standalone --nproc_per_node 8 pretrain_gpt.py {MODEL} {flags}\n"
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")

    options = f"--from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100 --vpp 1"
    done = meshtune("init", *options.split())

    assert done.status == 0, done.err
    assert "its words do not say vpp" in (tmp_path / "s.yaml").read_text(encoding="utf-8")


def test_a_model_that_is_named_brings_its_vocabulary(meshtune, tmp_path):
    """What the message asks for can be answered by one command."""
    script = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers $LAYERS --bf16\n"
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")

    done = meshtune(*f"init --from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100".split())

    assert done.status == 2
    assert "--model NAME" in done.err
    assert "--vocab-size" not in done.err
