from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import FASTEST


def test_space_counts_and_lists_the_candidates(meshtune, simulated):
    """`space --list` prints as many configurations as `feasible` says, each with every dimension."""
    told = meshtune("space", simulated, "--list", "--json")
    shown = meshtune("space", simulated, "--list")

    assert told.status == 0, told.err
    assert len(told.json["configs"]) == told.json["feasible"] == len(shown.out.splitlines())
    assert told.json["grid"] - told.json["removed"]["memory"] == told.json["feasible"]
    assert all(config.keys() == {*FASTEST, "assignment"} for config in told.json["configs"])


def test_a_listed_configuration_can_be_given_back(meshtune, simulated):
    """What `space --list` prints is what `--config` takes."""
    line = meshtune("space", simulated, "--list", "--set", "space.sequence_parallel=[true, false]").out.splitlines()[-1]

    done = meshtune("predict", simulated, "--config", line, "--json")

    assert done.status == 0, done.err


def test_space_in_words(meshtune, simulated):
    """`space` tells how many obey the rules, how many of them fit, and what each rule removed."""
    told, shown = meshtune("space", simulated, "--json").json, meshtune("space", simulated)

    first, *removed = shown.out.splitlines()
    assert first == f"{told['grid']} configurations obey every rule, {told['feasible']} of them may fit in memory."
    if "memory" in told["removed"]:
        assert removed.pop(0).strip().startswith(f"{told['removed']['memory']:,} are predicted by every")
    counted = {line.split()[0]: int(line.split()[1].replace(",", "")) for line in removed[1:]}
    assert counted == {name: count for name, count in told["removed"].items() if name != "memory"}


def test_space_of_a_replay_counts_its_rows(meshtune, replay):
    """The space of a replay is what was measured, failures included."""
    done = meshtune("space", replay)

    assert done.out == "12 measured rows (9 ran, 3 failed) hold 12 different configurations.\n"


def test_why_tells_every_broken_rule(meshtune, simulated):
    """`space --why` names all rules that a configuration breaks, not only the first."""
    told = meshtune("space", simulated, "--why", "tp=3,dp=5,vpp=2,zero_stage=0", "--json")
    shown = meshtune("space", simulated, "--why", "tp=3,dp=5,vpp=2,zero_stage=0")

    assert told.status == shown.status == 0
    reasons = told.json["reasons"]
    expected = {
        "devices",
        "heads",
        "kv_heads",
        "ffn",
        "sequence_ranks",
        "global_batch",
        "vpp_two_stages",
        "job.zero_stage",
    }
    assert reasons.keys() == expected
    assert "8 devices" in reasons["devices"]
    assert "16 sequences" in reasons["global_batch"]
    assert all(f"  {name}: {reason}\n" in shown.out for name, reason in reasons.items())


def test_why_names_memory(meshtune, hopeless):
    """A configuration that obeys every rule and does not fit has memory as its reason, with the numbers."""
    done = meshtune("space", hopeless, "--why", "tp=8", "--json")

    assert done.status == 0
    assert done.json["reasons"].keys() == {"memory"}
    assert "GiB" in done.json["reasons"]["memory"]


def test_why_of_a_candidate(meshtune, simulated):
    """A configuration that is a candidate has no reasons."""
    assert meshtune("space", simulated, "--why", "tp=8", "--json").json["reasons"] == {}
    assert meshtune("space", simulated, "--why", "tp=8").out.endswith("is in the space.\n")


def test_why_of_the_experts_configuration(meshtune, tmp_path):
    """The current configuration may break rules; `--why` tells them, and that it stays."""
    path = tmp_path / "study.yaml"
    path.write_text(study(current="{tp: 8}", space="{tp: [1, 2, 4]}"), encoding="utf-8")

    done = meshtune("space", path, "--why", "tp=8")

    assert "is in the space as the current configuration, although:\n  space.tp:" in done.out


def test_why_of_a_replay_is_whether_somebody_measured_it(meshtune, replay):
    """No rule prunes a replay: its candidates are the measured rows, and nothing else."""
    measured, other = (meshtune("space", replay, "--why", config, "--json") for config in ("dp=8", "tp=2,dp=4,mbs=4"))

    assert measured.json["reasons"] == {}
    assert other.json["reasons"] == {"measured": "is none of the 12 measured configurations"}


def test_known_knobs_are_listed(meshtune, tmp_path):
    """`--knobs` lists the searched knobs first, and for every known one its source and why it may pay or not."""
    file = tmp_path / "study.yaml"
    file.write_text(
        "name: known\nmodel: llama3-8b\ncluster: {name: dgx-h100, hosts: 8}\n"
        "job: {sequence_length: 8192, global_batch_size: 512}\nruntime: megatron-core\n"
        "space: {knobs: [tp_comm_overlap, {name: my_own, flag: --mine}]}\ntrial: {backend: simulated}\n",
        encoding="utf-8",
    )

    told = meshtune("space", file, "--knobs").out
    rows = meshtune("space", file, "--knobs", "--json").json["knobs"]

    assert [row["name"] for row in rows if row["searched"]] == ["tp_comm_overlap", "my_own"]
    assert rows[0]["recommended"]
    assert rows[0]["goes_to"] == ["--tp-comm-overlap"]
    assert all(row["source"] and row["reason"] for row in rows if row["name"] != "my_own")
    assert told.index("my_own") < told.index("not searched") < told.index("moe_dispatcher: needs a model with experts")
