import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.blocks.experts import slots_per_expert
from costmodels.job.parallel_config import DEGREES, RECOMPUTE_MODES, ParallelConfig
from costmodels.job.runtime import find_runtime, runtime_names
from hardware.io.errors import ConfigError
from tests.support.settings.mixed_models import MIXED, STATES, WHOLE
from tests.support.settings.small_spaces import (
    OPENED,
    RUNTIME_OF,
    raw_product,
    rows_of,
    rules_broken_by_row,
    setting_of,
)
from tests.support.studies.broken_studies import GOOD, study
from tuner.space.enumeration import broken_rules, enumerate_space
from tuner.space.rules.pipeline import UNEQUAL_CHUNKS
from tuner.space.rules.rule_sets import DUPLICATE_RULES, LAYER_PADDING, RULE_SETS, RULES, THINNING_RULES
from tuner.study_file.config import load_study

# The catalog


def test_each_runtime_of_the_catalog_has_a_rule_set():
    """The set that a profile names exists, and some layout of a small job obeys it."""
    for runtime in map(find_runtime, runtime_names()):
        setting, options = setting_of(runtime.rule_set, batch=64, num_layers=8)
        assert len(enumerate_space(replace(setting, runtime=runtime), options)[0]) > 0, runtime.name


def test_rules_and_their_sets_name_each_other():
    """Every set holds known rules, each once; every rule stands in some set, and every set is named by some runtime."""
    assert all(len(set(rules)) == len(rules) for rules in RULE_SETS.values())
    assert set().union(*RULE_SETS.values()) == set(RULES)
    assert {*DUPLICATE_RULES, *THINNING_RULES, *UNEQUAL_CHUNKS} <= set(RULES)
    assert set(RUNTIME_OF) == set(RULE_SETS)
    assert {find_runtime(name).rule_set for name in runtime_names()} == set(RULE_SETS) - set(LAYER_PADDING)


def test_every_reason_is_a_text_without_a_full_stop():
    """Reasons can be told in any setting, and be put in brackets after the rule's name."""
    for rule_set, names in RULE_SETS.items():
        setting, _ = setting_of(rule_set)
        reasons = [RULES[name].reason(setting) for name in names]
        assert all(reasons)
        assert reasons == [reason.strip(" .") for reason in reasons]


# The frameworks against a slow oracle: each function says in plain arithmetic what a framework can launch


class Case:
    """The numbers of one mesh and schedule, by short names."""

    def __init__(self, setting, layers, mesh, mbs, vpp, ep):
        """Reads the sizes that the sentences below are about."""
        model = setting.job.model
        self.pp, self.tp, self.dp, self.cp, self.up = mesh
        self.vpp, self.ep = vpp, ep
        self.replicas = self.dp * self.cp * self.up
        self.micro_batches = setting.job.global_batch_size // (self.dp * mbs)
        self.layers, self.heads, self.kv_heads = layers, model.plain.num_heads, model.plain.num_kv_heads
        self.experts, self.devices_per_host = model.num_experts or 1, setting.cluster.devices_per_host
        self.length = setting.job.sequence_length
        sizes = [model.plain.expert_ffn_size, model.plain.shared_expert_ffn_size]
        if any(not model.plain.is_moe_layer(layer) for layer in range(model.num_layers)):
            sizes.append(model.plain.ffn_size)
        self.mlp_divides = all(size % self.tp == 0 for size in sizes)
        told = model.plain.ffn_size if len(sizes) == 3 else model.plain.expert_ffn_size
        self.halves_are_equal = told // self.tp % 2 == 0
        slots = slots_per_expert(self.length, top_k=model.top_k, num_experts=self.experts) if model.is_moe else 0
        self.token_chunks = math.gcd(self.length, slots) if slots else 0
        self.tied = model.tied_embeddings
        self.projected = (self.heads + 2 * self.kv_heads) * model.plain.head_dim
        self.is_moe, self.inner, self.hidden = model.is_moe, model.plain.expert_ffn_size, model.hidden_size
        self.ring_chunks = 2 * self.cp if self.cp > 1 else 1

    @property
    def kv_heads_divide_or_repeat(self):
        """Megatron copies a key-value head to several tp ranks."""
        return self.kv_heads % self.tp == 0 or self.tp % self.kv_heads == 0

    @property
    def ring_and_ulysses_fit(self):
        """Ring attention deals two chunks per rank, Ulysses one."""
        return self.length % (self.up * self.ring_chunks) == 0


def flexparallel(c):
    """Heads and the ring's chunks divide, tp stays in a host; interleaving needs three stages and whole rounds."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.devices_per_host % c.tp == 0 and c.length % c.ring_chunks == 0
    obeys = obeys and c.layers % (c.pp * c.vpp) == 0 and c.dp % c.ep == 0
    return obeys and (c.vpp == 1 or (c.pp > 2 and c.micro_batches % c.pp == 0))


def equal_parts(c):
    """Heads, MLP and sequence divide."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.kv_heads_divide_or_repeat and c.mlp_divides
    return obeys and c.length % (c.tp * c.up * c.ring_chunks) == 0


def nanotron(c):
    """Whole heads, pipelines whose micro-batches nearly fill them, and nothing but pp, tp and dp."""
    obeys = c.kv_heads % c.tp == 0 and c.mlp_divides and c.pp <= c.layers and c.micro_batches >= c.pp - 1
    return obeys and (c.cp, c.up, c.vpp, c.ep) == (1, 1, 1, 1)


def equal_heads(c):
    """Heads, their projection and the MLP divide; each rank of cp*up gets two chunks of the sequence."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.kv_heads_divide_or_repeat and c.mlp_divides
    ranks = c.cp * c.up
    return obeys and c.projected % c.tp == 0 and (ranks == 1 or c.length % (2 * ranks) == 0)


def mindspeed(c):
    """Equal parts and whole rounds of micro-batches, a layer in each chunk; experts over a whole stage."""
    obeys = equal_heads(c) and c.pp * c.vpp <= c.layers and c.replicas % c.ep == 0
    return obeys and (c.vpp == 1 or (c.pp > 1 and c.micro_batches % c.pp == 0))


def megatron(c):
    """As above, with key-value heads for Ulysses and halves of MLPs, ends without layers, and rounds of any size."""
    obeys = equal_heads(c) and c.replicas % c.ep == 0 and max(c.kv_heads // c.tp, 1) % c.up == 0
    obeys = obeys and c.halves_are_equal
    return obeys and c.pp * c.vpp <= c.layers + 2 and (c.vpp == 1 or (c.pp > 1 and c.micro_batches >= c.pp))


def megatron_2021(c):
    """Heads, layers and MLP divide; interleaving needs three stages and whole rounds of micro-batches."""
    obeys = c.heads % c.tp == 0 and c.kv_heads_divide_or_repeat and c.mlp_divides
    obeys = obeys and (c.cp, c.up, c.ep) == (1, 1, 1) and c.layers % (c.pp * c.vpp) == 0
    return obeys and (c.vpp == 1 or (c.pp > 2 and c.micro_batches % c.pp == 0))


def megatron_deepspeed(c):
    """Megatron's layers on a pipeline without interleaving, whose stages may be uneven."""
    obeys = c.heads % c.tp == 0 and c.kv_heads_divide_or_repeat and c.mlp_divides
    return obeys and (c.cp, c.up, c.ep, c.vpp) == (1, 1, 1, 1) and c.pp <= c.layers


def gpt_neox(c):
    """As above, with experts over data parallel ranks and without copies of key-value heads."""
    obeys = c.kv_heads % c.tp == 0 and c.mlp_divides and c.pp <= c.layers
    return obeys and (c.cp, c.up, c.vpp) == (1, 1, 1) and c.dp % c.ep == 0


def paddle(c):
    """Equal parts; ring attention or Ulysses; interleaving needs three stages and a micro-batch for each."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.kv_heads_divide_or_repeat and c.mlp_divides
    obeys = obeys and max(c.kv_heads // c.tp, 1) % c.up == 0 and 1 in (c.cp, c.up) and c.ring_and_ulysses_fit
    obeys = obeys and c.layers % (c.pp * c.vpp) == 0 and c.dp % c.ep == 0
    return obeys and (c.vpp == 1 or (c.pp > 2 and c.micro_batches >= c.pp))


def torchtitan(c):
    """Any split with a layer in each chunk but of tied embeddings; masks of whole blocks for each rank of the ring."""
    obeys = c.kv_heads % c.tp == 0 and c.mlp_divides and c.up == 1 and (c.cp == 1 or c.length % (128 * c.cp) == 0)
    obeys = obeys and c.pp * c.vpp <= c.layers and (c.pp == 1 or not c.tied)
    # experts whose ranks are those of dp, cp and tp are never cut by tp
    obeys = obeys and (not c.is_moe or c.ep == 1 or c.tp == 1)
    if c.vpp == 1:
        return obeys and c.micro_batches >= c.pp
    rounds = c.micro_batches // c.pp or 1
    return obeys and c.pp > 1 and c.micro_batches % rounds == 0


def fsdp(c):
    """Data parallel ranks and experts over them, nothing else."""
    return (c.pp, c.tp, c.cp, c.up, c.vpp) == (1, 1, 1, 1, 1) and c.dp % c.ep == 0


def maxtext(c):
    """One program for all stages: layers and micro-batches divide by them."""
    obeys = c.kv_heads % (c.tp * c.up) == 0 or (c.kv_heads % c.tp == 0 and c.up == 1)
    obeys = obeys and c.mlp_divides and 1 in (c.cp, c.up) and c.ring_and_ulysses_fit and c.dp % c.ep == 0
    obeys = obeys and c.layers % (c.pp * c.vpp) == 0 and c.micro_batches % c.pp == 0
    return obeys and (c.vpp == 1 or c.pp > 1)


def internevo(c):
    """Tensor parallelism or its sequence parallel mode; layers divide by chunks, chunks need not by stages."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.kv_heads % c.tp == 0 and c.mlp_divides
    obeys = obeys and (c.tp == 1 or c.cp * c.up == 1) and c.ring_and_ulysses_fit and c.replicas % c.ep == 0
    obeys = obeys and (c.dp % c.experts == 0 or c.experts % c.dp == 0) and c.pp * c.vpp <= c.layers
    return obeys and (c.vpp == 1 or (c.pp > 1 and c.micro_batches % c.pp == 0))


def mindformers(c):
    """Any split with a layer in each chunk and a micro-batch for each stage."""
    obeys = c.kv_heads % (c.tp * c.up) == 0 and c.mlp_divides and c.ring_and_ulysses_fit and c.dp % c.ep == 0
    return obeys and c.pp * c.vpp <= c.layers and c.micro_batches >= c.pp and (c.vpp == 1 or c.pp > 1)


def torch_reference(c):
    """Equal parts of heads and sequence; any split with a layer in each chunk; experts over a whole stage."""
    obeys = c.heads % (c.tp * c.up) == 0 and c.kv_heads % c.tp == 0 and c.mlp_divides
    obeys = obeys and c.length % (c.tp * c.up * (2 * c.cp if c.cp > 1 else 1)) == 0
    obeys = obeys and c.pp * c.vpp <= c.layers and c.replicas % c.ep == 0
    rounds = c.micro_batches // c.pp or 1
    return obeys and (c.vpp == 1 or (c.pp > 1 and c.micro_batches >= c.pp and c.micro_batches % rounds == 0))


def jax_reference(c):
    """One stage; heads, MLPs, sequence and its chunks divide; experts are on whole axes."""
    obeys = (c.pp, c.vpp) == (1, 1) and c.kv_heads % (c.tp * c.up) == 0
    left = c.ep
    for size in (c.up, c.cp):
        if left > 1:
            obeys = obeys and left % size == 0
            left //= size
    obeys = obeys and c.token_chunks % (c.tp * c.cp * c.up) == 0
    # left is 0 where ep is less than an axis, which is none of its multiples
    return obeys and c.dp % max(left, 1) == 0 and c.mlp_divides and c.length % (c.tp * c.cp * c.up) == 0


def torch_planned(c):
    """The same with one micro-batch."""
    return c.micro_batches == 1 and jax_reference(c)


ORACLES = (
    *(flexparallel, fsdp, gpt_neox, internevo, jax_reference, maxtext, megatron, megatron_2021, megatron_deepspeed),
    *(mindformers, mindspeed, nanotron, paddle, torch_planned, torch_reference, torchtitan),
)
FRAMEWORKS = {one.__name__.replace("_", "-"): one for one in ORACLES} | {"megatron-2022": megatron_2021}
SPLITS_THE_SEQUENCE_OVER_TP = ("gpt-neox", "internevo", "megatron-2022", "mindformers", "nanotron", "paddle")
SPLITS_WHAT_RANKS_HOLD = ("megatron", "mindspeed")
NO_ZERO_BESIDE_A_PIPELINE = ("gpt-neox", "megatron", "paddle")
EXPERTS_WANT_A_SPLIT_SEQUENCE = ("megatron", "mindspeed", "torch-reference")
CHUNKS_MAY_BE_UNEQUAL = ("megatron", "mindformers", "mindspeed", "torch-reference", "torchtitan")
NO_SEQUENCE_PARALLELISM = ("megatron-2021", "megatron-deepspeed")


def torchtitan_deals_experts(case, stage):
    """Whether ep divides the ranks of one copy, and experts that are cut are cut into equal parts."""
    shards = case.dp if stage else 1
    inside = case.tp * case.cp * shards
    if not case.is_moe:
        return True
    if inside % case.ep:
        return False
    if case.ep > 1:
        parts, inner, ranks = inside // case.ep, case.inner, inside
    else:
        parts, inner, ranks = shards * case.cp, case.inner // case.tp, case.dp * case.cp
    return ranks <= case.experts or (inner % parts == 0 and case.hidden % parts == 0)


def further_that_obey(rule_set, setting, opened, case):
    """The values of recompute, zero_stage and sequence_parallel for one mesh, each the job's unless opened."""
    job, runtime = setting.job, setting.runtime
    recomputes = runtime.recompute_modes if "recompute" in opened else [job.recompute]
    stages = runtime.zero_stages if "zero_stage" in opened else [job.zero_stage]
    splits = [0, 1] if "sequence_parallel" in opened else [int(runtime.sequence_parallel)]
    for recompute, stage, split in itertools.product(recomputes, stages, splits):
        if rule_set in EXPERTS_WANT_A_SPLIT_SEQUENCE and job.model.is_moe and case.tp > 1 and not split:
            continue
        if "zero_stage" in opened and stage > runtime.zero_stages[0] and case.replicas == 1:
            continue
        if "sequence_parallel" in opened and split and case.tp == 1:
            continue
        if split and rule_set in NO_SEQUENCE_PARALLELISM:
            continue
        if split and rule_set in SPLITS_THE_SEQUENCE_OVER_TP and case.length % case.tp:
            continue
        if split and rule_set in SPLITS_WHAT_RANKS_HOLD and case.length % (case.tp * case.cp * case.up):
            continue
        if rule_set == "torchtitan" and case.length % ((case.tp if split else 1) * case.ring_chunks):
            continue
        if rule_set == "torchtitan" and not torchtitan_deals_experts(case, stage):
            continue
        if stage == 3 and rule_set == "gpt-neox" and case.is_moe:
            continue
        if stage > 1 and case.pp > 1 and rule_set in NO_ZERO_BESIDE_A_PIPELINE:
            continue
        yield RECOMPUTE_MODES.index(recompute), stage, split


def is_searched(rule_set, layers, pp, vpp):
    """Whether chunks are equal or, where they need not be, shorter than with fewer of them."""
    if rule_set not in CHUNKS_MAY_BE_UNEQUAL:
        return layers % vpp == 0
    longest, before = (math.ceil(layers / (pp * chunks)) for chunks in (vpp, max(vpp - 1, 1)))
    return vpp == 1 or layers % (pp * vpp) == 0 or longest < before


def oracle(rule_set, setting, opened) -> list[tuple]:
    """Every configuration that the framework can launch, by plain loops over all numbers."""
    devices, batch = setting.cluster.num_devices, setting.job.global_batch_size
    layers, experts = setting.job.model.num_layers, setting.job.model.num_experts or 1
    if rule_set == "flexparallel":
        layers += -layers % 8  # no-op layers
    found = []
    for pp, tp, dp, cp in itertools.product(range(1, devices + 1), repeat=4):
        up = devices // (pp * tp * dp * cp)
        if pp * tp * dp * cp * up != devices:
            continue
        for mbs, vpp, ep in itertools.product(range(1, batch + 1), range(1, layers + 3), range(1, experts + 1)):
            if batch % (dp * mbs) or experts % ep or not is_searched(rule_set, layers, pp, vpp):
                continue
            case = Case(setting, layers, (pp, tp, dp, cp, up), mbs, vpp, ep)
            if FRAMEWORKS[rule_set](case):
                further = further_that_obey(rule_set, setting, opened, case)
                found.extend((pp, tp, dp, cp, up, vpp, ep, mbs, *values) for values in further)
    return sorted(found)


@st.composite
def small_settings(draw, rule_set):
    """A job of few layers, heads and sequences on few devices, and opened dimensions."""
    layers = draw(st.integers(1, 10))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    experts = draw(st.sampled_from([0, 0, 2, 4, 6]))
    moe = {"num_experts": experts, "top_k": 1, "expert_ffn_size": draw(st.sampled_from([6, 8, 12]))} if experts else {}
    if experts and layers > 1 and draw(st.booleans()):
        moe["num_dense_layers"] = 1
    setting, options = setting_of(
        rule_set,
        hosts=draw(st.sampled_from([1, 2, 3])),
        devices_per_host=draw(st.sampled_from([4, 2, 3, 1])),
        sequence_length=draw(st.sampled_from([8, 12, 14, 16, 48])),
        batch=draw(st.integers(1, 12)),
        num_layers=layers,
        hidden_size=48,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        head_dim=4,
        ffn_size=draw(st.sampled_from([6, 8, 12])),
        tied_embeddings=draw(st.booleans()),
        **moe,
    )
    opened = tuple(name for name in OPENED if draw(st.booleans()))
    return setting, replace(options, opened=opened)


@pytest.mark.parametrize("rule_set", FRAMEWORKS)
@settings(max_examples=40)
@given(data=st.data())
def test_the_grid_is_what_the_framework_can_launch(rule_set, data):
    """For each framework the grid is exactly what plain loops over its own checks find, in the same order."""
    setting, options = data.draw(small_settings(rule_set))

    grid, _ = enumerate_space(setting, options)

    assert rows_of(grid) == oracle(rule_set, setting, options.opened)


@settings(max_examples=30)
@given(data=st.data())
def test_nothing_is_lost_between_kept_and_removed(data):
    """Kept and removed configurations together are the raw product; kept ones break no rule, others do."""
    setting, options = data.draw(st.sampled_from(["flexparallel", "megatron", "nanotron"]).flatmap(small_settings))
    raw = raw_product(setting, options, options.opened)

    grid, removed = enumerate_space(setting, options)

    assert len(grid) + sum(removed.values()) == len(raw)
    kept = set(rows_of(grid))
    for row, broken in zip(rows_of(raw), rules_broken_by_row(setting, options, raw), strict=True):
        assert (row in kept) == (not broken), row


# No dead rule

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 14336}


FSDP2 = {"devices_per_host": 8, "job": {"zero_stage": 3}, "runtime": {"torch_fsdp2": True, "zero_stages": (0, 1, 2, 3)}}
SIX_RANKS = {"devices_per_host": 6, "ffn_size": 12, "sequence_length": 48}


@pytest.mark.parametrize("rule_set", ["megatron", "unknown"])
def test_fsdp2_of_megatron_runs_neither_pipelines_nor_expert_parallelism(rule_set):
    """With the fact the space has what Megatron-LM runs else, without these two, and at ZeRO 2 and 3 where opened."""
    without = {**FSDP2, "runtime": FSDP2["runtime"] | {"torch_fsdp2": False}}
    for opened in ((), ("zero_stage",)):
        (fsdp2, options), (own, _) = (setting_of(rule_set, **one, **MOE) for one in (FSDP2, without))
        options = replace(options, opened=opened)
        pp, ep, stage = (
            (DEGREES + OPENED).index("pp"),
            (DEGREES + OPENED).index("ep"),
            (DEGREES + OPENED).index("zero_stage"),
        )
        rows = [row for row in rows_of(enumerate_space(own, options)[0]) if row[pp] == row[ep] == 1 and row[stage] > 1]

        assert rows
        assert set(rows) <= set(rows_of(enumerate_space(fsdp2, options)[0]))
        assert all(row[pp] == row[ep] == 1 and row[stage] > 1 for row in rows_of(enumerate_space(fsdp2, options)[0]))


def with_model(setting_and_options, model):
    """The same job of another model."""
    setting, options = setting_and_options
    return replace(setting, job=replace(setting.job, model=model)), options


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "cp", "up"),
    [
        *((16, 8, 1, 2, 1), (16, 8, 2, 4, 1), (16, 8, 2, 2, 2), (16, 8, 1, 16, 1), (12, 4, 1, 3, 1), (12, 4, 2, 3, 1)),
        *((12, 2, 1, 6, 1), (12, 2, 1, 1, 4), (12, 6, 1, 4, 1), (12, 6, 3, 4, 1), (24, 6, 2, 4, 1), (24, 6, 2, 6, 2)),
    ],
)
def test_states_are_dealt_as_megatron_deals_them(heads, groups, tp, cp, up):
    """Ranks of a sequence have whole heads, and whole groups or copies of one, as megatron-core's own class asserts.

    Source: megatron-core 0.19.2 ssm/mamba_context_parallel.py, of which the loop below has the conditions.
    """
    state = replace(STATES, num_heads=heads, num_groups=groups)
    model = replace(MIXED, layers=((WHOLE,), (state,)))
    setting, options = with_model(setting_of("megatron", devices_per_host=tp * cp * up), model)
    broken = broken_rules(setting, options, ParallelConfig(tp=tp, cp=cp, up=up))

    of_tp, ranks = groups // tp, cp * up
    is_whole = heads // tp % ranks == 0
    is_dealt = ranks % of_tp == 0 if of_tp < ranks else of_tp % ranks == 0
    assert ("scanned_heads" not in broken) == (is_whole and is_dealt)


@pytest.mark.slow
@pytest.mark.parametrize("rule_set", RULE_SETS)
def test_each_rule_alone_is_the_reason_of_some_refusal(rule_set):
    """No rule is dead: each refuses some configuration that no other refuses, if need be with `layers` switched off.

    Where nothing pads the layers, `layers` implies `pp_layers`, which then only speaks when `layers` does not.
    """
    varieties = [
        (setting_of(rule_set, hosts=4, devices_per_host=2, batch=12, num_layers=6), ()),
        (setting_of(rule_set, devices_per_host=6, num_heads=12, num_kv_heads=4, ffn_size=12, sequence_length=48), ()),
        (setting_of(rule_set, devices_per_host=6, num_heads=6, num_kv_heads=6, ffn_size=4, sequence_length=48), ()),
        (setting_of(rule_set, devices_per_host=6, num_heads=8, num_kv_heads=8, ffn_size=48, sequence_length=48), ()),
        (setting_of(rule_set, devices_per_host=8, sequence_length=20), ("sequence_parallel",)),
        (setting_of(rule_set, devices_per_host=8, num_heads=12, num_kv_heads=4, ffn_size=48, sequence_length=48), ()),
        (setting_of(rule_set, devices_per_host=4, num_layers=8, job={"sequence_parallel": False}, **MOE), ()),
        (setting_of(rule_set, devices_per_host=6, batch=12, **MOE), ()),
        (setting_of(rule_set, devices_per_host=4, sequence_length=12, **MOE | {"num_experts": 6, "top_k": 1}), ()),
        (setting_of(rule_set, devices_per_host=4, job={"zero_stage": 2}, runtime={"zero_stages": (0, 1)}), ()),
        (setting_of(rule_set, devices_per_host=4, runtime={"zero_stages": (0, 1, 2, 3)}), OPENED),
        (setting_of(rule_set, job={"recompute": "full"}, runtime={"recompute_modes": ("none",)}), ()),
        (setting_of(rule_set, runtime={"offload_modes": ("none",)}), ()),
        (setting_of(rule_set, devices_per_host=4, batch=4, num_layers=4), OPENED),
        (setting_of(rule_set, hosts=3, devices_per_host=2, batch=10, num_layers=12), ()),
        (setting_of(rule_set, batch=8, num_layers=4), ()),
        (setting_of(rule_set, devices_per_host=4, num_layers=4, tied_embeddings=True), ()),
        (setting_of(rule_set, devices_per_host=1, runtime={"zero_stages": (0, 1, 2, 3)}), OPENED),
        (setting_of(rule_set, devices_per_host=4, vocab_size=50), ()),
        (setting_of(rule_set, devices_per_host=4, ffn_size=12), ()),
        (setting_of(rule_set, **SIX_RANKS, num_heads=6, num_kv_heads=2), ()),
        (setting_of(rule_set, **SIX_RANKS, num_heads=12, num_kv_heads=4, head_dim=48), ()),
        (setting_of(rule_set, devices_per_host=8, sequence_length=1280, job={"zero_stage": 2}, **MOE), OPENED),
        (setting_of(rule_set, devices_per_host=8, job={"zero_stage": 3}, **MOE | {"expert_ffn_size": 36}), OPENED),
        *((setting_of(rule_set, **FSDP2, **model), ()) for model in (MOE, {"tied_embeddings": True})),
        (setting_of(rule_set, **FSDP2 | {"job": {"zero_stage": 3, "precision": "fp16"}}), ()),
        (setting_of(rule_set, devices_per_host=8, job={"optimizer": "muon"}), ("zero_stage",)),
        (setting_of(rule_set, job={"recompute_layers": 1}, runtime={"recompute_modes": RECOMPUTE_MODES}), OPENED),
        (with_model(setting_of(rule_set, devices_per_host=6, batch=12, sequence_length=48), MIXED), ()),
    ]
    zero, split = (varieties[0][0][0].job.zero_stage, varieties[0][0][0].runtime.sequence_parallel)
    usual = {"zero_stage": zero, "sequence_parallel": split}
    others = [  # not in any raw product: a user may still ask `--why` of them
        *({"dp": 8, "ep": 2}, {"dp": 16}, {"pp": 2, "dp": 2, "mbs": 2, "vpp": 3}, {"dp": 4, "dp_shard": 2}),
        *({"dp": 8, "dp_shard": 2}, {"dp": 8, "dp_shard": 3}, {"dp": 8, "dp_shard": 8}),
        *({"dp": 8, "ep": 4, "dp_shard": 2}, {"dp": 4, "ep": 4, "dp_shard": 2}),
        *({"dp": 8, "expert_tp": 2}, {"dp": 4, "expert_tp": 2}, {"tp": 4, "expert_tp": 4, "sequence_parallel": True}),
        *({"dp": 8, "offload": "optimizer"}, {"dp": 8, "offload": "optimizer", "zero_stage": 0}),
        *({"dp": 8, "offload": "optimizer", "zero_stage": 3}, {"dp": 8, "dp_shard": 2, "zero_stage": 3}),
        *({"dp": 8, "recompute_layers": 1}, {"dp": 8, "recompute_layers": 1, "recompute": "selective"}),
    ]
    # what only an opened dimension refuses: it means the same as another value
    opened_too = [{"dp": 8, "expert_tp": 1}, {"dp": 8, "dp_shard": 8}, {"dp": 8, "recompute_layers": 200}]
    alone = set()
    for (setting, options), opened in varieties:
        open_options = replace(options, opened=opened)
        refusals = rules_broken_by_row(setting, open_options, raw_product(setting, options, opened))
        refusals += [frozenset(broken_rules(setting, open_options, ParallelConfig(**usual | one))) for one in others]
        apart = replace(options, opened=("expert_tp", "dp_shard", "recompute_layers"))
        refusals += [frozenset(broken_rules(setting, apart, ParallelConfig(**usual | one))) for one in opened_too]
        refusals += [broken - {"layers"} for broken in refusals if "pp_layers" in broken]
        alone |= {next(iter(broken)) for broken in refusals if len(broken) == 1}

    assert alone == set(RULE_SETS[rule_set]), set(RULE_SETS[rule_set]) - alone


# What people ran


PUBLISHED = {
    # Narayanan et al. 2021, table 1: 145.6 billion parameters, 80 layers, 96 heads, 1,536 devices
    "megatron-2021": (
        *(192, 2304, {"num_layers": 80, "hidden_size": 12288, "num_heads": 96, "num_kv_heads": 96, "ffn_size": 49152}),
        ParallelConfig(pp=8, tp=8, dp=24, zero_stage=0, sequence_parallel=False),
    ),
    # bigscience chronicles-prequel.md, section Rebalancing layers: 70 layers on 12 stages, 48 hosts
    "megatron-deepspeed": (
        *(48, 2048, {"num_layers": 70, "hidden_size": 14336, "num_heads": 112, "num_kv_heads": 112, "ffn_size": 57344}),
        ParallelConfig(pp=12, tp=4, dp=8, mbs=2, sequence_parallel=False),
    ),
    # torchtitan benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 405B, 8 x 8 x 8 on 512 devices
    "torchtitan": (
        *(64, 256, {"num_layers": 126, "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 8, "ffn_size": 53248}),
        ParallelConfig(pp=8, tp=8, dp=8, vpp=2, zero_stage=2),
    ),
    # llm-foundry scripts/train/benchmarking/README.md: MPT on FSDP alone
    "fsdp": (8, 512, {}, ParallelConfig(dp=64, mbs=8, zero_stage=3, sequence_parallel=False)),
    # InternEvo doc/en/train_performance.md: InternLM 7B with ZeRO 1 on 128 devices
    "internevo": (
        *(16, 1024, {"num_heads": 32, "num_kv_heads": 32, "ffn_size": 11008}),
        ParallelConfig(dp=128, mbs=2, sequence_parallel=False),
    ),
}


@pytest.mark.parametrize("rule_set", PUBLISHED)
def test_published_runs_obey_the_rules_of_their_framework(rule_set):
    """A layout that its framework's authors published breaks no rule."""
    hosts, batch, model, config = PUBLISHED[rule_set]
    setting, options = setting_of(rule_set, hosts=hosts, sequence_length=2048, batch=batch, **model)

    assert broken_rules(setting, options, config) == {}


# What a runtime cannot do, told to a user


def study_of(tmp_path, runtime, *overrides):
    """Load a study of llama3-8b on 8 devices under `runtime`."""
    path = tmp_path / "study.yaml"
    path.write_text(study(**GOOD | {"runtime": runtime}))
    return load_study(path, overrides=overrides)


def test_an_expert_that_the_runtime_cannot_launch_is_told_in_one_warning(tmp_path):
    """llm-foundry has neither tp nor pp: the current configuration stays, and one warning gives both reasons."""
    space = study_of(tmp_path, "llm-foundry", "current={pp: 2, tp: 4, dp: 1}").problem.space()

    (told,) = (warning for warning in space.warnings if "the current configuration" in warning)
    assert "no_tp (llm-foundry has no tensor parallelism, so tp must be 1)" in told
    assert "no_pp (llm-foundry has no pipeline parallelism, so pp must be 1)" in told


@pytest.mark.parametrize(
    ("runtime", "override", "told"),
    [
        ("llm-foundry", "space.tp=[2, 4]", r"space\.tp = \[2, 4\].*llm-foundry has no tensor parallelism"),
        ("nanotron", "space.vpp=[2]", r"space\.vpp = \[2\].*nanotron has no interleaved schedule"),
        ("megatron-deepspeed", "job.sequence_parallel=true", r"job\.sequence_parallel = True.*is not offered by the"),
        ("megatron-lm-2021", "space.sequence_parallel=[false, true]", r"space\.sequence_parallel = True.*is not off"),
        ("maxtext", "job.zero_stage=1", r"job\.zero_stage = 1.*is not offered by the runtime maxtext.*valid: 3"),
        ("nanotron", "space.expert_tp=[0, 1]", r"space\.expert_tp = 1.*offered by the runtime nanotron.*valid: 0"),
        (
            "nanotron",
            "space.offload=[none, optimizer]",
            r"space\.offload = 'optimizer'.*offered by the runtime nanotron",
        ),
        ("mindspeed", "job.dp_shard=8", r"job\.dp_shard = 8.*is not offered by the runtime mindspeed.*valid: 0"),
    ],
)
def test_a_space_that_the_runtime_cannot_have_is_refused(tmp_path, runtime, override, told):
    """Asking for nothing but what a framework lacks is a mistake, named with the key and the value."""
    with pytest.raises(ConfigError, match=told):
        study_of(tmp_path, runtime, override)


def test_a_degree_that_the_runtime_lacks_may_be_named_with_1(tmp_path):
    """`tp: [1, 2]` under llm-foundry searches tp 1, and counts the other under no_tp."""
    space = study_of(tmp_path, "llm-foundry", "space.tp=[1, 2]").problem.space()

    assert set(space.grid.tp.tolist()) <= {1}
    assert space.num_before_memory > 0
    assert space.removed["no_tp"] > 0


@pytest.mark.parametrize(("runtime", "stage"), [("megatron-core", 1), ("torchtitan", 2), ("maxtext", 3)])
def test_the_zero_stage_of_a_silent_study_is_one_that_the_runtime_offers(tmp_path, runtime, stage):
    """A study that says nothing takes stage 1, or the lowest that its runtime has."""
    assert study_of(tmp_path, runtime).problem.setting.job.zero_stage == stage
