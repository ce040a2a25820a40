"""Temporary PostgreSQL server for tests and benchmarks, available if the server's programs are installed."""

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
STOP_LIMIT_S = 30.0


def server_programs() -> Path | None:
    """Return the folder of PostgreSQL's server programs, or None if they are not installed."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


class PostgresqlServer:
    """Server that listens on 127.0.0.1 only, and on the same port after each start.

    Args:
        password: Password of its only user.
    """

    def __init__(self, password: str) -> None:
        programs = server_programs()
        assert programs is not None, "asked only where they are installed"
        self._programs = programs
        self._account = _other_user()
        self._folder = Path(tempfile.mkdtemp(prefix="meshtune-postgresql-"))
        self._log = self._folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"postgresql://{USER}:{password}@127.0.0.1:{self._port}/postgres"
        self._password = password

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Main process of the server."""
        assert self._process is not None, "a server has a process once it was started"
        return self._process

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if not (self._folder / "data").exists():
            self._create()
        with self._log.open("ab") as told:
            self._process = subprocess.Popen(
                [
                    str(self._programs / "postgres"),
                    *("-D", str(self._folder / "data"), "-p", str(self._port)),
                    *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
                ],
                stdout=subprocess.DEVNULL,
                stderr=told,
                cwd=self._folder,
                **self._account,
            )
        self.wait()

    def wait(self) -> None:
        """Wait until the server answers."""
        _wait_until_it_answers(self.process, self.url, self._log)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server without waiting for connected clients.

        Args:
            how: Signal to send: SIGINT aborts transactions in order (`fast`), SIGQUIT ends everything at once
                (`immediate`).
        """
        self.process.send_signal(how)
        self.process.wait(STOP_LIMIT_S)

    def _create(self) -> None:
        (self._folder / "password").write_text(self._password)
        if self._account:
            shutil.chown(self._folder, self._account["user"])
            shutil.chown(self._folder / "password", self._account["user"])
        subprocess.run(
            [
                str(self._programs / "initdb"),
                *("-D", str(self._folder / "data"), "-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"),
                f"--pwfile={self._folder / 'password'}",
            ],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **self._account,
        )

    def close(self) -> None:
        """Stop the server if it runs, and remove all its files."""
        try:
            if self._process is not None and self._process.poll() is None:
                self.stop()
        finally:
            shutil.rmtree(self._folder)


@contextmanager
def postgresql_server(password: str) -> Iterator[str]:
    """Yield the URL of a server that runs as long as the block."""
    server = PostgresqlServer(password)
    try:
        server.start()
        yield server.url
    finally:
        server.close()


def _other_user() -> dict[str, Any]:
    """Return the account under which to run the server; empty if this process does not run as root.

    PostgreSQL refuses to run as root.
    """
    if os.geteuid():
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    name = "postgres" if "postgres" in names else "nobody"
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


def _wait_until_it_answers(server: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = 60.0) -> None:
    import psycopg2  # noqa: PLC0415 # an optional dependency, not needed to look for the programs

    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
