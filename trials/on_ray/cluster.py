"""Join a Ray cluster by its address, and fail soon if none answers.

Ray tries an unreachable address for minutes and cannot be interrupted. So the address is probed first.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError
from trials.submitted_job import is_submitted_job

CONNECT_LIMIT_S = 10.0
"""Time that a cluster's address may take to answer [s]."""

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4


STUDY = "meshtune_study"
"""Key of a job's metadata in Ray that holds the name of its study."""


def job_of(ray: Any, study: str) -> Any:
    """Return the configuration of a job in Ray that names its study; none if it has no study."""
    return ray.job_config.JobConfig(metadata={STUDY: study}) if study else None


def join_cluster(ray: Any, address: str, *, study: str = "") -> None:
    """Join the cluster at `auto`, `ray://host:port` or `host:port`, and make its workers find our modules.

    Args:
        ray: Ray.
        address: Address of the cluster.
        study: Name of the study that the job of this program belongs to; a submitted job has its own metadata.

    Raises:
        ConfigError: The address is malformed, or no Ray answers there.
    """
    where = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address
    if where != "auto":
        _check_answers(where)
    packages = Path(__file__).resolve().parents[2]
    # a submitted job brings its own working directory and must not be given another environment
    environment = (
        None
        if is_submitted_job()
        else {"py_modules": [str(packages / name) for name in ("hardware", "costmodels", "trials")]}
    )
    try:
        ray.init(
            address=address,
            job_config=None if is_submitted_job() else job_of(ray, study),
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=environment,
        )
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise _no_cluster(address, first_line(error)) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error; Ray's errors go on with long explanations."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _check_answers(address: str) -> None:
    """Check that a gRPC server listens at `address`, as on all of Ray's own ports.

    It sends the HTTP/2 client preface and an empty SETTINGS frame, and expects a SETTINGS frame back (RFC 9113, section
    3.4). If Ray's TLS is switched on, it only tries to connect.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise ConfigError(
            "is not the address of a Ray cluster",
            key="address",
            value=address,
            nearest="give local, auto, ray://host:10001 or host:6379",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("0", "", "false"):
                connection.settimeout(CONNECT_LIMIT_S / 2)
                connection.sendall(_HTTP2_PREFACE)
                frame = connection.recv(9)
                if len(frame) < 4 or frame[3] != _HTTP2_SETTINGS:
                    raise _no_cluster(address, "the server there is not Ray")
    except OSError as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, cause: str) -> ConfigError:
    return ConfigError(
        f"is not a Ray cluster that can be reached ({cause})",
        key="address",
        value=address,
        nearest="check `ray status` there (a cluster that asks for tokens needs RAY_AUTH_MODE=token here too), "
        "unset RAY_ADDRESS, or set address: local",
    )
