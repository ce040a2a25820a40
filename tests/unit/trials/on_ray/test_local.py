"""Ray on this machine: what it starts, and where it does not start."""

import os

import pytest

from benchmarks.support.process_table import commands_below
from hardware.io.errors import ConfigError
from trials.on_ray.local import import_ray, start_local_ray, stop_local_ray
from trials.on_ray.side_processes import without_helpers


def test_a_ray_that_does_not_start_is_told(tmp_path, monkeypatch):
    """Where Ray cannot start, here because its sockets' paths become too long, that is one message with its cause."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 30)))

    with pytest.raises(ConfigError, match=r"address = 'local': does not start on this machine \(.+\); set RAY_TMPDIR"):
        start_local_ray(1)

    assert not import_ray().is_initialized()


def test_a_ray_that_starts_too_slowly_is_started_again(monkeypatch):
    """Where Ray gives up its own start once, as on a busy machine, the second start counts."""
    ray, failed = import_ray(), []
    init = ray.init

    def slow_at_first(**options):
        if not failed:
            failed.append(options)
            raise Exception("The current node timed out during startup.")  # as Ray has it
        return init(**options)

    monkeypatch.setattr(ray, "init", slow_at_first)
    try:
        assert start_local_ray(1)
        assert ray.is_initialized()
    finally:
        stop_local_ray(ray)


@pytest.mark.slow
def test_a_ray_of_one_program_has_no_helpers():
    """A Ray of one program, which works, has no process of Ray's dashboard, autoscaler or logs."""
    try:
        assert start_local_ray(1)
        assert import_ray().get(import_ray().remote(lambda: 1).remote()) == 1
        commands = " ".join(commands_below(os.getpid()))
    finally:
        stop_local_ray(import_ray())

    assert "gcs_server" in commands
    assert not [name for name in ("dashboard.py", "monitor.py") if name in commands]


def test_other_versions_of_ray_start_as_they_do(monkeypatch):
    """A Ray that has no such function is left as it is, and every function is back after the block."""
    ray = import_ray()
    node = ray._private.node.Node
    monkeypatch.delattr(node, "start_monitor")
    before = node.start_log_monitor
    with without_helpers(ray):
        assert not hasattr(node, "start_monitor")
        assert node.start_log_monitor is not before
    assert not hasattr(node, "start_monitor")
    assert node.start_log_monitor is before
