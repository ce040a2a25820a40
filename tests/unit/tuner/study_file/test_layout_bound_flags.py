"""Flags that Megatron-LM takes with today's layout only are no part of the commands of other layouts."""

import pytest

from costmodels.job.parallel_config import ParallelConfig
from tests.unit.tuner.study_file.test_word_differences import MODEL, MOE
from tuner.study_file.config import load_study

DATA = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
INTERLEAVED = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
PIPELINE = "--pipeline-model-parallel-size 4"
EXPERTS = "--sequence-parallel --moe-token-dispatcher-type alltoall"
ONE, TWO = ParallelConfig(tp=1, dp=16, mbs=1), ParallelConfig(tp=2, dp=8, mbs=1)
STAGES, CHUNKS = ParallelConfig(pp=4, tp=2, dp=2, mbs=1), ParallelConfig(pp=4, tp=2, dp=2, vpp=2, mbs=1)
PAIR = ParallelConfig(pp=2, tp=2, dp=4, vpp=2, mbs=1)


@pytest.mark.parametrize(
    ("words", "flags", "taken", "refused"),
    [
        (MODEL, "--sequence-parallel --tp-comm-overlap", [TWO, STAGES], [ONE]),
        (f"{MODEL} {PIPELINE}", "--defer-embedding-wgrad-compute", [STAGES, CHUNKS], [ONE, TWO]),
        (f"{MODEL} {INTERLEAVED}", "--overlap-param-gather-with-optimizer-step", [CHUNKS, PAIR], [TWO, STAGES]),
        (f"{MODEL} {INTERLEAVED}", "--overlap-p2p-communication-warmup-flush", [CHUNKS, PAIR], [TWO, STAGES]),
        (f"{MODEL} {INTERLEAVED}", "--no-overlap-p2p-communication", [TWO, STAGES, CHUNKS], [PAIR]),
    ],
)
def test_a_flag_stays_where_the_framework_takes_it(meshtune, tmp_path, words, flags, taken, refused):
    """megatron-core 0.19.2's validate_args accepts and refuses just these, asked with its own parser."""
    told = words_of(meshtune, tmp_path, f"{words} {flags} {DATA}")
    flag = flags.split()[-1]

    assert [flag in told(config) for config in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ParallelConfig(tp=2, dp=8, ep=8, mbs=1, expert_tp=1), True),
        (ParallelConfig(pp=2, tp=2, dp=4, ep=4, vpp=2, mbs=1, expert_tp=1), True),
        (ParallelConfig(pp=2, tp=2, dp=4, ep=4, mbs=1, expert_tp=1), False),
        (ParallelConfig(tp=2, dp=8, ep=1, mbs=1, expert_tp=1), False),
    ],
)
def test_exchanges_of_experts_overlap_where_there_are_two_passes(meshtune, tmp_path, config, expected):
    """They need experts apart, and with several stages chunks; the delayed weight gradients need the overlap."""
    told = words_of(
        meshtune, tmp_path, f"{MOE} {EXPERTS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute {DATA}"
    )

    words = told(config)

    assert ("--overlap-moe-expert-parallel-comm" in words, "--delay-wgrad-compute" in words) == (expected, expected)


@pytest.mark.parametrize("spelling", ["--moe-enable-deepep", "--moe-flex-dispatcher-backend deepep"])
def test_a_lone_rank_of_experts_sends_nothing_by_deepep(meshtune, tmp_path, spelling):
    """DeepEP's dispatcher asserts TPxEP > 1, so that a layout without either has the all-to-all."""
    words = MOE.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1")
    told = words_of(meshtune, tmp_path, f"{words} --moe-token-dispatcher-type flex {spelling} {DATA}")

    apart, alone = (told(ParallelConfig(dp=16, ep=ep, mbs=1, expert_tp=1)) for ep in (4, 1))

    assert apart[apart.index("--moe-token-dispatcher-type") + 1] == "flex"
    assert all(word in apart for word in spelling.split())
    assert alone[alone.index("--moe-token-dispatcher-type") + 1] == "alltoall"
    assert spelling.split()[0] not in alone


def words_of(meshtune, tmp_path, flags):
    """Writes the command of a configuration of the study that `init` makes of a script with these flags."""
    script = (
        f"torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr h --master_port 1 pretrain_gpt.py {flags}"
    )
    (tmp_path / "train.sh").write_text(f"{script} --log-interval 1\n", encoding="utf-8")
    done = meshtune(*f"init --from-megatron {tmp_path}/train.sh --out {tmp_path}/s.yaml --cluster dgx-h100".split())
    assert done.status == 0, done.err
    backend = load_study(tmp_path / "s.yaml").trials.backend
    return lambda config: backend.plan(config, 0).arguments
