"""A PostgreSQL server of one's own, for tests and benchmarks, where the server's programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

USER = "meshtune"


def server_programs() -> Path | None:
    """The folder of PostgreSQL's server programs, None where they are not installed."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


@contextmanager
def postgresql_server(password: str) -> Iterator[str]:
    """The URL of a server that runs as long as the block; it listens on 127.0.0.1 alone."""
    programs = server_programs()
    assert programs is not None, "asked only where they are installed"
    account = _other_user()
    folder = Path(tempfile.mkdtemp(prefix="meshtune-postgresql-"))
    try:
        (folder / "password").write_text(password)
        if account:
            shutil.chown(folder, account["user"])
            shutil.chown(folder / "password", account["user"])
        subprocess.run(
            [
                str(programs / "initdb"),
                *("-D", str(folder / "data"), "-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"),
                f"--pwfile={folder / 'password'}",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **account,
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(
            [
                str(programs / "postgres"),
                *("-D", str(folder / "data"), "-p", str(port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "log").open("wb"),
            cwd=folder,
            **account,
        )
        try:
            url = f"postgresql://{USER}:{password}@127.0.0.1:{port}/postgres"
            _wait_until_it_answers(server, url, folder / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # stop without waiting for clients that are still connected
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _other_user() -> dict[str, Any]:
    """The server refuses to run as root: the account to give to it, empty if this is no root."""
    if os.geteuid():
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    name = "postgres" if "postgres" in names else "nobody"
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = 60.0) -> None:
    import psycopg2  # noqa: PLC0415 # an extra, which whoever only asks for the programs may lack

    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
