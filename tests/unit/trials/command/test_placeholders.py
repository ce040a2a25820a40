import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster_file import cluster_from_mapping
from hardware.io.errors import ConfigError
from tests.support.programs.small_commands import CLUSTER, JOB, backend_of
from trials.backend import HostNeeds
from trials.command.placeholders import (
    OF_CONFIG,
    PLACEHOLDERS,
    SIZES_ELSEWHERE,
    check_text,
    fill_all,
    fill_text,
    values_of,
    values_of_variables,
    variables_in,
)

CONFIG = ParallelConfig(dp=1, tp=2, mbs=2)
VALUES = values_of(JOB, CLUSTER, CONFIG, trial_number=7, warmup_steps=2, steps=5)


def test_every_placeholder_has_a_value():
    """What is promised can be filled in."""
    assert set(VALUES) == set(OF_CONFIG)
    assert VALUES | {} == VALUES
    assert (VALUES["tp"], VALUES["mbs"], VALUES["total_steps"], VALUES["trial"]) == ("2", "2", "7", "7")
    assert VALUES["world_size"] == VALUES["num_devices"] == str(CONFIG.num_devices)
    assert VALUES["num_micro_batches"] == str(JOB.global_batch_size // 2)
    assert VALUES["sequence_parallel"] in ("true", "false")


@pytest.mark.parametrize("keys", [{"hosts": 4, "devices_per_host": 64}, {"hosts": 64, "devices_per_host": 4}])
def test_racks_are_launched_host_by_host(keys, tmp_path):
    """Also where a study counts a rack as one host, a command starts on hosts of four devices."""
    cluster = cluster_from_mapping({"name": "gb200-nvl72", **keys}, tmp_path)
    config = ParallelConfig(dp=256, mbs=1)

    values = values_of(JOB, cluster, config, trial_number=7, warmup_steps=2, steps=5)

    assert (values["num_hosts"], values["devices_per_host"], values["num_devices"]) == ("64", "4", "256")
    assert values["hosts"] == ",".join(map(str, range(64)))
    assert backend_of(cluster=cluster).hosts == (HostNeeds(gpus=4, processes=1),) * 64


def test_an_argument_stays_one_argument():
    """Blanks, quotes and dollar signs reach the program as they are: no shell reads them."""
    assert fill_all(["a b;{tp}", "$HOME", "'{{x}}'"], VALUES, ()) == ["a b;2", "$HOME", "'{x}'"]


def test_a_variable_of_the_environment_is_a_placeholder():
    """`{env:NAME}` is the value of a variable, as it is, in an argument or a value; each is asked for once."""
    texts = ["--token={env:HF_TOKEN}", "{env:HF_TOKEN}{tp}", "{{env:X}}", "{env:_a1}"]
    for text in texts:
        check_text(text, flags=False)

    assert variables_in(texts) == ["HF_TOKEN", "_a1"]
    values = VALUES | values_of_variables([("HF_TOKEN", "a {tp} $b"), ("_a1", "")])
    assert fill_all(texts, values, {}) == ["--token=a {tp} $b", "a {tp} $b2", "{env:X}", ""]


def test_flags_become_arguments():
    """`{flags}` alone stands for as many arguments as there are flags, also for none."""
    assert fill_all(["run", "{flags}", "end"], VALUES, {"flags": ("--tp", "2")}) == ["run", "--tp", "2", "end"]
    assert fill_all(["run", "{flags}"], VALUES, {"flags": ()}) == ["run"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tp={tpp}", "did you mean 'tp'?"),
        ("{flgs}", "did you mean 'flags'?"),
        ("--nodes={nnodes}", "has no value for {nnodes}; {num_hosts}, which is the same"),
        ("{MASTER_ADDR}", "{master_address}, which is the same"),
        ("{tp", "has an unmatched brace"),
        ("{tp:04}", "allows only names"),
        ("{tp!r}", "allows only names"),
        ("{}", "has no value for {}"),
        ("{tp.__class__}", "has no value for"),
        ("{tp[0]}", "has no value for"),
        ("x{flags}", "must be an argument of its own"),
        ("{env:}", "has no value for {env}"),
        ("{env:A-B}", "names no environment variable"),
        ("{env:A!r}", "names no environment variable"),
        ("{ENV:A}", "allows only names"),
    ],
)
def test_what_cannot_be_filled_is_refused(text, message):
    """Unknown names, formats and attributes are the user's mistake."""
    with pytest.raises(ConfigError) as caught:
        check_text(text, flags=True)

    assert message in str(caught.value)


@pytest.mark.parametrize("name", SIZES_ELSEWHERE)
def test_what_launchers_call_a_size_has_a_placeholder(name):
    """Each name of a launcher leads to a placeholder, and is none itself."""
    assert SIZES_ELSEWHERE[name] in PLACEHOLDERS
    assert name not in PLACEHOLDERS


@given(text=st.text(alphabet="{}abtp:!. ", max_size=20))
def test_what_is_accepted_can_be_filled(text):
    """A text passes the check, and then it can be filled in, or it is refused with a message."""
    try:
        check_text(text, flags=False)
    except ConfigError:
        return
    fill_text(text, VALUES | {"host_rank": "0", "master_address": "a", "master_port": "1"})
