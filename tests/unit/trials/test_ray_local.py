"""Ray on this machine, where it does not start."""

import pytest

from hardware.io.errors import ConfigError
from trials.ray_local import import_ray, start_local_ray


def test_a_ray_that_does_not_start_is_told(tmp_path, monkeypatch):
    """Where Ray cannot start, here because its sockets' paths become too long, that is one message with its cause."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 30)))

    with pytest.raises(ConfigError, match=r"address = 'local': does not start on this machine \(.+\); try again when"):
        start_local_ray(1)

    assert not import_ray().is_initialized()
