import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tuner.space.enumeration
from costmodels.job.parallel_config import DEGREES, ParallelConfig
from costmodels.job.runtime import find_runtime, other_runtimes
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import LEAST_CHANCE, estimate_memory
from hardware.io.errors import ConfigError
from tests.support.settings.small_spaces import raw_product, rows_of, rules_broken_by_row, setting_of
from tuner.space.enumeration import (
    SpaceOptions,
    broken_rules,
    build_space,
    divisors,
    enumerate_space,
    launchable,
    setting_for,
    why_not,
)
from tuner.space.rules.rule_sets import RULE_SETS
from tuner.study_file.config import load_study

STUDIES = Path(__file__).resolve().parents[4] / "configs" / "studies"

# FlexParallel, table 2, column "# Trials / Search Space"
TABLE_2 = {
    "llama-7b-8": 387,
    "llama-13b-8": 333,
    "llama2-13b-8": 429,
    "llama2-34b-16": 1228,
    "llama3-8b-8": 289,
    "gpt-13b-32": 1040,
    "gpt-38b-4k-128": 3458,
    "gpt-38b-32k-64": 2410,
    "qwen2.5-7b-8": 261,
    "pangu-135b-6144": 58205,
    "pangu-135b-8192": 27608,
    "mixtral-8x7b-64": 2314,
}

# What the paper counted


@pytest.mark.parametrize(("row", "count"), TABLE_2.items(), ids=TABLE_2)
def test_all_rows_of_table_2_come_out_exactly(row, count):
    """The grid before memory has the size that FlexParallel's table 2 prints; each row's study is complete."""
    study = load_study(STUDIES / "flexparallel" / f"{row}.yaml")

    assert study.problem.space().num_before_memory == count
    assert study.name == f"flexparallel-{row}"
    assert study.problem.current.num_devices == study.problem.setting.cluster.num_devices == int(row.rpartition("-")[2])


def test_every_row_of_table_2_has_a_study():
    """The folder holds the twelve rows and nothing else."""
    assert {path.stem for path in (STUDIES / "flexparallel").glob("*.yaml")} == set(TABLE_2)


def test_expert_of_pangu_8192_stays_although_a_rule_is_against_it():
    """Table 2's own configuration has 12 micro-batches for 8 stages and vpp 6: kept, with a warning that says so."""
    study = load_study(STUDIES / "flexparallel" / "pangu-135b-8192.yaml")

    space = study.problem.space()

    assert rows_of(space.grid)[-1][:8] == (8, 8, 128, 1, 1, 6, 1, 1)
    assert len(space.warnings) == 1
    assert "vpp_micro_batches" in space.warnings[0]
    assert len(space.grid) == space.num_before_memory - space.removed.get("memory", 0) + 1


def test_the_closest_miss_is_named_where_nothing_fits():
    """A model that no configuration fits ends in warnings with the closest one's memory and what may help."""
    study = load_study(
        STUDIES / "llama3-8b-dgx-h100.yaml", overrides=["model=llama3-405b", "cluster.hosts=1", "current=~"]
    )

    space = study.problem.space()

    assert len(space.grid) == 0
    assert space.removed["memory"] == space.num_before_memory > 0
    closest, remedy = space.warnings
    assert all(words in closest for words in ("nothing fits: the closest, pp=", "GiB of 79.1 GiB"))
    assert "`meshtune rank STUDY --hosts " in remedy


def test_broken_rules_names_the_rules_one_configuration_at_a_time():
    """`broken_rules` of one configuration agrees with the vectorised rules, and is empty for what the grid keeps."""
    setting, options = setting_of("megatron", batch=4, num_layers=6)
    raw = raw_product(setting, options)

    for position, expected in enumerate(rules_broken_by_row(setting, options, raw)):
        assert set(broken_rules(setting, options, raw.config(position))) == expected


# What a study says about its space


def test_switching_a_rule_off_keeps_exactly_what_it_alone_removed():
    """`without` adds the configurations that broke no other rule, and nothing else."""
    setting, options = setting_of("flexparallel", hosts=2, devices_per_host=4, batch=12, num_layers=8)
    raw = raw_product(setting, options)
    before = set(rows_of(enumerate_space(setting, options)[0]))
    refusals = rules_broken_by_row(setting, options, raw)

    for rule in RULE_SETS["flexparallel"]:
        if rule == "devices":
            continue
        grid, removed = enumerate_space(setting, replace(options, without=(rule,)))
        freed = {row for row, broken in zip(rows_of(raw), refusals, strict=True) if broken == {rule}}
        assert set(rows_of(grid)) == before | freed
        assert rule not in removed


@pytest.mark.parametrize("rule", ["devices", "no_vpp"])
def test_only_a_rule_of_the_set_can_be_switched_off(rule):
    """Naming a rule of another set, or the number of devices, is an error that lists the choices."""
    study = load_study(STUDIES / "flexparallel" / "llama-7b-8.yaml")

    with pytest.raises(ConfigError, match=r"space\.without = .*flexparallel.*valid: .*heads"):
        setting_for(
            study.problem.setting.job,
            study.problem.setting.cluster,
            study.problem.setting.runtime,
            SpaceOptions(rule_set="flexparallel", without=(rule,)),
        )


def test_tightening_a_degree_keeps_exactly_those_values():
    """`tp: [1, 4]` keeps the configurations with these tp and counts the others under `space.tp`; the current
    configuration stays whatever its tp.
    """
    setting, options = setting_of("megatron")
    whole = rows_of(enumerate_space(setting, options)[0])

    tight = replace(options, allowed=(("tp", (1, 4)),))
    grid, removed = enumerate_space(setting, tight)

    assert rows_of(grid) == [row for row in whole if row[1] in (1, 4)]
    assert removed["space.tp"] > 0
    space = build_space(setting, tight, current=ParallelConfig(tp=8))
    assert sorted(set(space.grid.tp.tolist())) == [1, 4, 8]
    assert "space.tp (the study allows tp only 1, 4)" in space.warnings[0]


@pytest.mark.parametrize(
    ("dimension", "allowed"),
    [("recompute", (0, 2)), ("offload", (0, 1)), ("zero_stage", (0, 1)), ("sequence_parallel", (0, 1))],
)
def test_an_opened_dimension_multiplies_the_candidates(dimension, allowed):
    """Each degree combination appears once per allowed value, less the duplicates that mean the same."""
    setting, options = setting_of("megatron")
    closed = enumerate_space(setting, options)[0]

    opened = replace(options, opened=(dimension,), allowed=((dimension, allowed),))
    grid, removed = enumerate_space(setting, opened)

    duplicates = {
        "recompute": 0,
        "offload": 0,
        "zero_stage": int((closed.dp * closed.cp * closed.up == 1).sum()),
        "sequence_parallel": int((closed.tp == 1).sum()),
    }[dimension]
    assert len(grid) == 2 * len(closed) - duplicates
    assert grid.dimensions == (*DEGREES, dimension)
    assert set(getattr(grid, dimension).tolist()) == set(allowed)
    assert len(grid.positions()) == len(grid)
    assert ("zero_needs_replicas" in removed) == (dimension == "zero_stage")


@pytest.mark.parametrize(("rule_set", "stages"), [("megatron", (1, 2)), ("torchtitan", (2, 3))])
def test_meshes_without_replicas_stay_where_stage_zero_is_not_allowed(rule_set, stages):
    """A study that allows sharded stages only keeps the meshes without data parallel ranks."""
    setting, options = setting_of(rule_set)

    opened = replace(options, opened=("zero_stage",), allowed=(("zero_stage", stages),))
    grid = enumerate_space(setting, opened)[0]

    assert set(grid.zero_stage[grid.dp * grid.cp * grid.up == 1].tolist()) == set(stages)


@pytest.mark.parametrize("rule_set", ["megatron", "megatron-deepspeed", "gpt-neox"])
def test_offloaded_states_are_sharded(rule_set):
    """States on the host go with every ZeRO stage above 0, and where nothing is replicated with the lowest of these."""
    setting, options = setting_of(rule_set)
    opened = replace(options, opened=("offload", "zero_stage"))
    grid, removed = enumerate_space(setting, opened)

    replicas, on_host = grid.dp * grid.cp * grid.up, grid.is_offloaded
    assert set(grid.zero_stage[on_host].tolist()) == set(setting.runtime.zero_stages) - {0}
    assert set(grid.zero_stage[on_host & (replicas == 1)].tolist()) == {1}
    assert set(grid.zero_stage[~on_host & (replicas == 1)].tolist()) == {0}
    # each mesh with states on the host is one without, too
    plain = enumerate_space(setting, options)[0]
    assert len(enumerate_space(setting, replace(options, opened=("offload",)))[0]) == 2 * len(plain)
    assert removed["offload_needs_sharding"] > 0


# Degrees that only some frameworks have


SPARSE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 14336}


def test_experts_may_have_a_tensor_degree_of_their_own():
    """Opened, expert_tp adds the layouts whose experts are split otherwise, and ep may then span tp too, as it does
    where the job itself says expert_tp = 1.
    """
    setting, options = setting_of("megatron", **SPARSE)
    closed = enumerate_space(setting, options)[0]

    grid, removed = enumerate_space(setting, replace(options, opened=("expert_tp",), allowed=(("expert_tp", (0, 1)),)))

    whole = grid.tp * grid.dp * grid.cp * grid.up
    assert np.all(whole % (grid.expert_tensor * grid.ep) == 0)
    assert int((grid.expert_tp == 0).sum()) == len(closed)
    assert np.all(grid.tp[grid.expert_tp == 1] > 1)
    assert np.any(grid.ep[grid.expert_tp == 1] > (grid.dp * grid.cp * grid.up)[grid.expert_tp == 1])
    assert "expert_tp_distinct" in removed
    fixed, _ = enumerate_space(*setting_of("megatron", job={"expert_tp": 1}, **SPARSE))
    assert set(fixed.expert_tp.tolist()) == {1}
    assert fixed.ep[(fixed.tp == 8)].max() == 4


@pytest.mark.parametrize("rule_set", ["megatron", "fsdp"])
def test_states_may_be_sharded_over_a_part_of_dp(rule_set):
    """Opened, dp_shard adds each layout once more per proper divisor of dp that the study allows."""
    setting, options = setting_of(rule_set)
    closed = enumerate_space(setting, options)[0]

    grid, _ = enumerate_space(setting, replace(options, opened=("dp_shard",), allowed=(("dp_shard", (0, 2, 8)),)))

    assert len(grid) == len(closed) + int((closed.dp % 4 == 0).sum())
    assert set(grid.dp_shard.tolist()) == {0, 2}
    assert len(grid.positions()) == len(grid)


def test_a_copy_of_the_states_holds_all_experts():
    """Shards of two ranks cannot hold four experts dealt to four ranks."""
    setting, options = setting_of("megatron", **SPARSE)

    assert set(broken_rules(setting, options, ParallelConfig(dp=8, ep=4, dp_shard=2))) == {"dp_shard_holds_experts"}
    assert broken_rules(setting, options, ParallelConfig(dp=8, ep=4, dp_shard=4)) == {}


@pytest.mark.parametrize("limit", ["MAX_CANDIDATES", "MAX_COMBINATIONS"])
def test_a_space_that_is_too_large_is_refused_before_it_fills_memory(monkeypatch, limit):
    """One configuration more than the limit, kept or looked at on the way, ends in a message that says what to do."""
    setting, options = setting_of("megatron")
    size = len(enumerate_space(setting, options)[0])
    monkeypatch.setattr(tuner.space.enumeration, limit, size - 1)

    with pytest.raises(ConfigError, match=rf"space: has more than {size - 1:,} .*; tighten a degree"):
        enumerate_space(setting, options)

    monkeypatch.undo()
    monkeypatch.setattr(tuner.space.enumeration, "MAX_CANDIDATES", size)

    assert len(enumerate_space(setting, options)[0]) == size


# Why not, memory, and the current configuration


def test_why_not_tells_every_broken_rule_and_memory():
    """A configuration that breaks two rules and does not fit gets three reasons, with the numbers of the setting."""
    small = {"hosts": 2, "devices_per_host": 4, "batch": 12, "num_layers": 32}
    setting, options = setting_of("flexparallel", **small)
    config = ParallelConfig(pp=1, tp=8, dp=1, vpp=2, mbs=12)

    reasons = why_not(setting, options, config)

    assert set(reasons) == {"tp_divides_host", "vpp_three_stages"}
    assert "4 devices of a host" in reasons["tp_divides_host"]

    setting, options = setting_of("flexparallel", sequence_length=32768, **small)
    large = ParallelConfig(dp=4, pp=2, vpp=4, mbs=3)

    reasons = why_not(setting, options, large)

    assert set(reasons) == {"vpp_three_stages", "vpp_micro_batches", "memory"}
    assert "GiB" in reasons["memory"]
    assert "8% must stay free" in reasons["memory"]


def test_why_not_of_a_candidate_is_empty_and_of_everything_else_is_not():
    """`why_not` has a reason exactly for the raw configurations that the space leaves out."""
    setting, options = setting_of("flexparallel", devices_per_host=4, batch=4, num_layers=32, sequence_length=8192)
    space = build_space(setting, options, current=None)
    kept = set(rows_of(space.grid))
    raw = raw_product(setting, options)

    for position, row in enumerate(rows_of(raw)):
        assert (row in kept) == (not why_not(setting, options, raw.config(position))), row
    assert 0 < len(kept) < space.num_before_memory


@pytest.mark.parametrize("rule_set", ["megatron", "mindspeed", "torchtitan"])
@pytest.mark.parametrize("listed", [(), (("vpp", (1, 4, 5)),)])
def test_what_is_listed_and_why_agree_on_unequal_chunks(rule_set, listed):
    """A configuration is in the grid exactly if no rule speaks against it, whatever its number of chunks."""
    setting, options = setting_of(rule_set, devices_per_host=4, batch=6, num_layers=11)
    options = replace(options, allowed=listed)
    grid, _ = enumerate_space(setting, options)
    kept = {(c.pp, c.tp, c.dp, c.vpp, c.mbs) for c in map(grid.config, range(len(grid))) if c.cp == c.up == 1}
    zero = {"zero_stage": setting.job.zero_stage}

    for pp, tp, dp in ((1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)):
        for vpp, mbs in itertools.product(range(1, 15), (1, 2, 3, 6)):
            config = ParallelConfig(pp=pp, tp=tp, dp=dp, vpp=vpp, mbs=mbs, **zero)
            assert ((pp, tp, dp, vpp, mbs) in kept) == (not broken_rules(setting, options, config)), config


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp"),
    # Megatron-Bridge v0.2.0 docs/performance-summary.md: DeepSeek-V3, Llama 3.1 405B, Qwen3 235B, Kimi K2
    [(61, 4, 4), (61, 8, 4), (61, 16, 2), (126, 8, 8), (126, 16, 8), (94, 8, 4), (94, 4, 12), (61, 16, 4)],
)
def test_published_chunks_of_unequal_length_are_candidates(num_layers, pp, vpp):
    """Layers that the chunks of published recipes do not divide, or that leave the ends empty, are in the space."""
    setting, options = setting_of("megatron", devices_per_host=pp, batch=64, num_layers=num_layers)

    allowed = pp * vpp <= num_layers + 2
    assert bool(broken_rules(setting, options, ParallelConfig(pp=pp, vpp=vpp))) == (not allowed)


def certain(setting):
    """Return the setting with a profile that was fitted to peaks of the user's own cluster."""
    runtime = replace(setting.runtime, knows_cluster=True, knows_memory=True, memory_error=0.05)
    return replace(setting, runtime=runtime)


def masks_of(setting, options, grid):
    """Return which configurations may fit, by the name of each profile of the catalog and the study's own."""
    runtimes = [setting.runtime, *other_runtimes(setting.runtime)]
    return {
        runtime.name: estimate_memory(setting.predicted_by(runtime), grid).may_fit(
            options.memory_headroom, memory_error_of(runtime)
        )
        for runtime in runtimes
    }


@pytest.mark.parametrize("rules", ["megatron", "flexparallel"])
def test_memory_drops_what_fits_under_no_profile(rules):
    """The space holds a configuration if one profile of the catalog says that it may fit, and the own is not enough."""
    setting, options = setting_of(rules, batch=8, sequence_length=16384)
    grid, _ = enumerate_space(setting, options)
    masks = masks_of(setting, options, grid)

    space = build_space(setting, options, current=None)

    kept = np.any(list(masks.values()), axis=0)
    assert rows_of(space.grid) == rows_of(grid.take(kept))
    assert masks[setting.runtime.name].sum() < kept.sum() < len(grid)


def test_an_own_profile_of_memory_is_not_doubted():
    """Where the profile was fitted to peaks of the user's cluster, it alone decides, and the reason names no other."""
    doubted, options = setting_of("megatron", batch=8, sequence_length=32768)
    setting = certain(doubted)
    grid, _ = enumerate_space(setting, options)
    own = masks_of(setting, options, grid)[setting.runtime.name]

    space = build_space(setting, options, current=None)

    assert rows_of(space.grid) == rows_of(grid.take(own))
    dropped = grid.config(int(np.argmax(estimate_memory(setting, grid).needed_bytes)))
    assert "as the profile" not in why_not(setting, options, dropped)["memory"]
    assert "GiB as the profile" in why_not(doubted, options, dropped)["memory"]


def test_how_layers_are_cut_does_not_depend_on_the_profile():
    """Another profile brings its facts and constants, and leaves the split, the padding and the plans of the study."""
    setting, _ = setting_of("flexparallel")
    other = find_runtime("nanotron")

    found = setting.predicted_by(other).runtime

    kept = ("rule_set", "layer_split", "layer_padding", "layer_changes", "uneven")
    assert [getattr(found, name) for name in kept] == [getattr(setting.runtime, name) for name in kept]
    assert replace(found, **{name: getattr(other, name) for name in kept}) == other
    assert found.layer_split != other.layer_split


def test_space_keeps_what_may_leave_the_headroom_free():
    """A candidate fits with some probability, more headroom leaves fewer, and memory's count is the difference."""
    setting, options = setting_of("megatron", batch=8)
    setting = certain(setting)
    sizes = []
    for headroom in (0.1, 0.4, 0.7):
        space = build_space(setting, replace(options, memory_headroom=headroom), current=None)
        error = memory_error_of(setting.runtime)
        assert np.all(space.memory.probability_of_fit(headroom, error) >= LEAST_CHANCE)
        kept = space.num_before_memory - space.removed.get("memory", 0)
        assert len(space.grid) == len(space.memory.peak_bytes) == kept
        sizes.append(len(space.grid))

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize(
    ("current", "names"),
    [
        (ParallelConfig(tp=8), ()),
        (ParallelConfig(pp=2, tp=4, mbs=8, vpp=2), ("vpp_micro_batches", "vpp_three_stages")),
        (ParallelConfig(dp=8, mbs=3), ("memory",)),
    ],
    ids=["a candidate", "breaks two rules", "does not fit"],
)
def test_current_is_never_pruned(current, names):
    """The current configuration is in the grid exactly once; a warning names each thing that is against it."""
    setting, options = setting_of("flexparallel", batch=24, num_layers=32)

    space = build_space(setting, options, current=current)

    assert space.grid.positions().get(tuple(current.values().values())) is not None
    assert len(space.grid.positions()) == len(space.grid) == len(space.memory.peak_bytes)
    assert len(space.warnings) == bool(names)
    for name in names:
        assert name in space.warnings[0]


def test_launchable_is_what_the_cost_model_can_price():
    """Degrees that miss the devices, do not divide the batch, or exceed the layers cannot be the current one."""
    setting, _ = setting_of("megatron", batch=16, num_layers=4)

    for degrees in ({"pp": 4, "dp": 2}, {"dp": 8, "dp_shard": 4}):
        assert launchable(setting, ParallelConfig(**degrees))
    for degrees in ({"pp": 4, "dp": 4}, {"pp": 8}, {"dp": 8, "mbs": 4}, {"dp": 8, "ep": 2}, {"dp": 8, "dp_shard": 3}):
        assert not launchable(setting, ParallelConfig(**degrees))


def test_divisors_are_all_divisors():
    """Ascending, complete, without repetition."""
    for number in range(1, 400):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(
    ("dimension", "values", "note"),
    [
        ("tp", (3, 4), "space.tp: no configuration has tp 3: tp must divide the cluster's 8 devices"),
        (
            "tp",
            (1, *range(9, 40)),
            f"space.tp: no configuration has tp {', '.join(map(str, range(9, 29)))} and 11 more:",
        ),
        ("mbs", (1, 5, 6), "space.mbs: no configuration has mbs 5, 6: mbs must divide the global batch of"),
        ("vpp", (1, 35), "space.vpp: no configuration has vpp 35: vpp must be from 1 to 34, for a model of 32 layers"),
        ("ep", (1, 2), "space.ep: no configuration has ep 2: ep must be 1 without experts"),
        ("dp_shard", (0, 3), "space.dp_shard: no configuration has dp_shard 3: dp_shard must be 0, or divide"),
        ("pp", (1, 2), None),
    ],
    ids=["tp", "many", "mbs", "vpp", "ep", "dp_shard", "possible"],
)
def test_values_that_cannot_be_are_told(dimension, values, note):
    """A value that cannot be is named in a note with what it must meet, and the others are searched."""
    setting, options = setting_of("megatron")
    opened = (dimension,) if dimension == "dp_shard" else ()

    space = build_space(setting, replace(options, allowed=((dimension, values),), opened=opened), current=None)

    assert len(space.grid)
    assert len(space.warnings) == (note is not None)
    assert note is None or space.warnings[0].startswith(note)


def test_value_that_rules_remove_is_told():
    """A value that every configuration loses to rules is named in a note with the rule that removes the most."""
    setting, options = setting_of("megatron")

    space = build_space(setting, replace(options, allowed=(("pp", (1,)), ("vpp", (1, 2)))), current=None)

    assert [note.partition(";")[0] for note in space.warnings] == ["space.vpp: no configuration has vpp 2"]
    assert "most of them fall to " in space.warnings[0]
