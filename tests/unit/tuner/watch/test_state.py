"""State of a watch: written and read again, and refused where it is none."""

import json
from dataclasses import replace

import pytest

from costmodels.job.parallel_config import parse_config
from hardware.dynamics import HostEvent, Trace
from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import study
from tuner.replan.cluster_states import Figures, Setup
from tuner.study_file.config import load_study
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, LinkShare, PairRates
from tuner.watch.policy import Standing
from tuner.watch.state import Kept, locked, read_state, write_state

FIGURES = Figures(step_time_s=1.5, state_bytes=1e9, devices_per_host=8, nic_bytes_per_s=5e10)


@pytest.fixture
def config(tmp_path):
    """A study of two hosts."""
    file = tmp_path / "study.yaml"
    file.write_text(study(cluster="{name: dgx-h100, hosts: 2}"), encoding="utf-8")
    return load_study(file)


@pytest.fixture
def kept(config):
    """What a watch keeps of it."""
    whole = Setup(hosts=(0, 1), config=parse_config("tp=4,dp=4,mbs=2", config.problem.subject.defaults))
    half = Setup(hosts=(1,), config=parse_config("tp=8,recompute=full", config.problem.subject.defaults))
    standing = Standing(running=whole, since_s=7.25, at_s=1 / 3, figures=FIGURES, lost_steps={half: 0.1})
    return Kept(
        source="slurm",
        began_s=1.7e9 + 1 / 3,
        standing=standing,
        ran_on=("a", "b"),
        told="stay",
        seats=(Seat(node="n1", identity="x", losses=2, is_lost=False), Seat()),
        trace=Trace(events=(HostEvent(time_s=1 / 3, host=1, is_lost=True),)),
        links=Links(
            pairs=(PairRates(sender="n1", receiver="n2", reference_bytes_per_s=1e9 / 3, recent_bytes_per_s=(2.5e8,)),),
            shares=(LinkShare(link=("n1", "n2"), share=1 / 3), LinkShare(link=("n1",), found=(0.1,))),
        ),
    )


def test_the_state_is_read_as_it_was_written(tmp_path, config, kept):
    """A state reads back equal, also that of a watch whose job waits; without a file there is none."""
    file = tmp_path / "state.json"
    nothing = read_state(file, config)
    for one in (kept, replace(kept, standing=Standing(running=None, since_s=1.0, at_s=2.0))):
        write_state(file, config, one)

        assert read_state(file, config) == one
    assert nothing is None


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(version=2),
        lambda told: told.pop("seats"),
        lambda told: told["seats"].pop(),
        lambda told: told.update(running=7),
        lambda told: told["running"].update(since_s="now"),
        lambda told: told["running"]["setup"].update(hosts=[0]),
        lambda told: told["running"]["setup"].update(hosts=[1, 2]),
        lambda told: told["running"]["setup"].update(config="tp=0"),
        lambda told: told["running"]["figures"].update(step_time_s=0),
        lambda told: told.update(links=[]),
        lambda told: told["links"]["pairs"][0].update(reference_bytes_per_s=-1.0),
        lambda told: told["links"]["pairs"][0].update(recent_bytes_per_s=[0.0]),
        lambda told: told["links"]["shares"][0].update(share=1.5),
        lambda told: told["links"]["shares"][0].update(share=0.0),
        lambda told: told["links"]["shares"][0].update(link=["n2", "n1"]),
        lambda told: told["links"]["shares"][0].update(link=[]),
        lambda told: told["links"]["shares"][1].update(found=["slow"]),
        lambda told: told.update(trace="time_s,link,share\n1,h7,lost\n"),
    ],
)
def test_a_broken_state_is_refused(tmp_path, config, kept, change):
    """A state with a value that cannot be is refused with the file's name, and nothing is made of it."""
    file = tmp_path / "state.json"
    write_state(file, config, kept)
    told = json.loads(file.read_text(encoding="utf-8"))
    change(told)
    file.write_text(json.dumps(told), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"is no state of a watch.*state\.json|state\.json.*is no state of a watch"):
        read_state(file, config)


def test_a_state_from_before_there_was_a_probe_is_read(tmp_path, config, kept):
    """A state without links is that of a watch that has measured none."""
    file = tmp_path / "state.json"
    write_state(file, config, kept)
    told = json.loads(file.read_text(encoding="utf-8"))
    del told["links"]
    file.write_text(json.dumps(told), encoding="utf-8")

    assert read_state(file, config) == replace(kept, links=Links())


def test_the_state_of_another_study_is_refused(tmp_path, config, kept):
    """A state that another study left is not taken for one's own."""
    file = tmp_path / "state.json"
    write_state(file, replace(config, name="other"), kept)

    with pytest.raises(ConfigError, match="state of the study 'other' on 2 hosts"):
        read_state(file, config)


def test_one_process_holds_a_state(tmp_path):
    """While a state is held, nobody else gets it; afterwards it is free."""
    file = tmp_path / "state.json"
    with locked(file), pytest.raises(ConfigError, match="in use"), locked(file):
        pass
    with locked(file):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "no" / "state.json"):
        pass
