"""The optimizer's step by kinds of optimizers: what its passes move, and its matrix products."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.placement import local_table, pipelines
from costmodels.step.step_time import estimate_step
from costmodels.step.weights.kept_parts import fullest
from costmodels.step.weights.matrices import layer_matrices
from costmodels.step.weights.products import update_products
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

HOSTS = find_cluster("dgx-h100", hosts=1)
JOB = job_of(batch=64)
SHARDED = ParallelConfig(dp=8)


def step_of(job, *configs, cluster=HOSTS, **facts):
    """The predicted step of some configurations, without what a fit leaves for layers."""
    setting = setting_for(job, cluster)
    setting = replace(setting, runtime=replace(setting.runtime, residuals=(), **facts))
    return setting, estimate_step(setting, grid_of(*configs)).breakdown_s["optimizer"]


@pytest.mark.parametrize(
    ("name", "moved"), [("adam", 34), ("sgd", 26), ("plain_sgd", 18), ("lion", 26), ("ademamix", 42), ("lamb", 42)]
)
def test_passes_move_what_the_optimizer_keeps(name, moved):
    """Gradient twice (8), weight written in 16 bits (2), and its fp32 copy and each state read and written (8)."""
    setting, seconds = step_of(replace(JOB, optimizer=name), SHARDED)

    reached = setting.runtime.memory_efficiency * HOSTS.devices[0].memory_bandwidth_bytes_per_s
    assert seconds[0] * reached / (JOB.model.num_parameters / 8) == pytest.approx(moved)


@pytest.mark.parametrize("name", model_names())
def test_matrices_are_the_models_parameters(name):
    """All parameters of layers but norms and biases are in matrices, joined or apart."""
    model = find_model(name)
    job = TrainingJob(model=model, sequence_length=4096, global_batch_size=8)
    grid = grid_of(ParallelConfig())
    pieces = pipelines(setting_for(job, HOSTS), grid).each[0].stages.pieces.copy()
    if model.num_mtp_layers:  # the model's number of parameters leaves prediction modules out
        pieces[:, -3] = 0.0
    blocks = pieces @ model.blocks_of_piece
    tables = local_table(model, grid)[0] * (1 if model.tied_embeddings else 2) + model.embedding.positions

    for joins_gate, splits_qkv in ((True, True), (False, False)):
        matrices = layer_matrices(job, grid, joins_gate=joins_gate, splits_qkv=splits_qkv)
        held = sum((one.held(blocks) * one.local[0] * one.local[1])[0, 0] for one in matrices)
        rest = model.num_parameters - tables - held
        assert 0 <= rest < 2e-3 * model.num_parameters


def test_no_rank_has_more_than_a_greedy_assignment_gives_it():
    """The bound is reached by dealing out the costliest matrices first, up to Graham's 4/3, and never above it."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        ranks = int(rng.integers(1, 9))
        costs = rng.integers(1, 100, size=int(rng.integers(1, 5))).astype(float)
        held = rng.integers(0, 12, size=len(costs))
        loads = np.zeros(ranks)
        for cost in sorted(np.repeat(costs, held), reverse=True):
            loads[loads.argmin()] += cost

        kinds = [(np.array([c]), np.array([[n]])) for c, n in zip(costs, held, strict=True)]
        bound = fullest(kinds, np.array([ranks]))[0, 0]

        assert bound - 1e-6 <= loads.max() <= 4 / 3 * bound + 1e-6


def test_equal_matrices_are_dealt_out_whole():
    """Of 10 equal matrices on 4 ranks one has 3; on 16 ranks one has 1, whatever the mean."""
    kinds = [(np.array([5.0, 5.0, 5.0]), np.full((1, 3), 10))]

    assert fullest(kinds, np.array([4, 16, 1])).tolist() == [[15, 5, 50]]


def test_muon_keeps_one_state_of_matrices():
    """On one device without ZeRO, matrices have 4 + 4 bytes of states with their copy, all else 4 + 8."""
    config, model = ParallelConfig(zero_stage=0), JOB.model
    setting = setting_for(replace(JOB, optimizer="muon"), find_cluster("dgx-h100", hosts=1))

    states = estimate_memory(setting, grid_of(config)).parts_bytes["optimizer"][0]

    others = states / 4 - 2 * model.num_parameters
    tables = model.embedding.table * (1 if model.tied_embeddings else 2)
    assert tables <= others < 1.05 * tables + 1e-3 * model.num_parameters


def test_products_of_muon_take_their_flops_at_a_products_speed():
    """The step of Muon is longer than Adam's by at least its FLOPs at the device's peak, and less than twice that."""
    one = ParallelConfig(dp=8, zero_stage=0)
    big = replace(JOB, model=find_model("llama3-8b"))
    setting, muon = step_of(replace(big, optimizer="muon"), one)
    passes = step_of(big, one)[1]
    grid = grid_of(one)
    blocks = pipelines(setting, grid).each[0].stages.pieces @ setting.job.model.blocks_of_piece
    flop = 0.0
    for matrix in layer_matrices(setting.job, grid, joins_gate=True, splits_qkv=True):
        products = update_products(setting.job, setting.runtime, matrix)
        flop += sum(2 * p.m * p.k * p.n * p.times for p in products)[0] * matrix.held(blocks)[0, 0]

    peak = HOSTS.devices[0].peak_flop_per_s("bf16")
    assert flop / peak < muon[0] - passes[0] < 2.2 * flop / peak


def test_whole_matrices_on_ranks_shorten_muon():
    """With ZeRO 1 each rank multiplies its matrices alone; without, all of them."""
    big = replace(JOB, model=find_model("llama3-8b"), optimizer="muon")

    alone, shared = step_of(big, ParallelConfig(dp=8, zero_stage=0), ParallelConfig(dp=8))[1]

    assert alone / 9 < shared < alone / 6


def test_ways_of_tp_differ_in_products_and_exchanges():
    """Duplicated products are those of whole matrices; parts of matrices take the fewest."""
    big = replace(JOB, model=find_model("llama3-8b"), optimizer="muon")
    config = ParallelConfig(tp=8)
    modes = ("blockwise", "distributed", "duplicated")

    found = [step_of(big, config, muon_tp_mode=mode)[1][0] for mode in modes]

    assert found[0] < found[1] < found[2]
    assert found[2] > 4 * found[0]


@pytest.mark.parametrize("name", ["muon", "adafactor", "adam_8bit", "sgd"])
@pytest.mark.parametrize("config", [ParallelConfig(dp=4, pp=2), ParallelConfig(tp=2, dp=4)])
def test_the_simulator_has_the_same_step(name, config):
    """The optimizer's part of the simulated step is that of the closed form."""
    setting, seconds = step_of(replace(JOB, optimizer=name), config)

    simulated = simulate_step(setting, config).breakdown_s["optimizer"]
    assert simulated == pytest.approx(seconds[0], rel=1e-6)
