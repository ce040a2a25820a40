"""Ray on this machine, where it does not start."""

import pytest

from hardware.io.errors import ConfigError
from trials.ray_local import import_ray, start_local_ray, stop_local_ray


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
