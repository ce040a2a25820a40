"""Server of a study's pages: optuna-dashboard's own server over `StudyView`, limited to reading and to editing notes.

There is no login, so the server must resist requests that other pages make a browser send. A page from another origin
cannot write: browsers name its origin, and before a PUT they send an OPTIONS request (CORS); both are refused. Nor can
a page use a name of its own that resolves to this server (DNS rebinding): a request must address the server by a known
name.
"""

from __future__ import annotations

import errno
import io
import ipaddress
import json
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import optuna

from hardware.io.errors import ConfigError, shorten
from hardware.io.looking import may_write
from tuner.dashboard.artifacts import StudyFiles
from tuner.dashboard.view import StudyView
from tuner.run.studies import stored_study
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.request import StudyRequest
from tuner.study_file.storage_address import StorageAddress
from tuner.terminal.console import printable, say

PORT = 8080
"""Default port of optuna-dashboard."""

LOOPBACK = "127.0.0.1"

_NOTE = re.compile(r"/api/studies/\d+(/\d+)?/note")
_REFUSED = "meshtune dashboard only shows studies and saves notes; it changes nothing else"
_NOT_A_NOTE = 'a note is {"version": NUMBER, "body": TEXT} as application/json, of at most 1 MB'
_ONLY_READ = "you may read this study and not write it, so that notes cannot be saved"
_ELSEWHERE = "meshtune dashboard saves notes from its own pages only"
_NOT_HERE = "meshtune dashboard does not accept this host name; use localhost, an IP address or --host NAME"

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::\d+)?")

_HEADERS = (("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "SAMEORIGIN"))
"""Headers that prevent browsers from treating a log as a page, and other sites from framing ours (clickjacking)."""

MOST_NOTE_BYTES, MOST_READ_BYTES = 1_000_000, 4_000_000
"""Largest note that is taken, and largest request that is read to its end before it is refused."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Address at which the pages are served.

    Attributes:
        host: Name or address of this machine.
        port: Port number; 0 for a free one, None for 8080 or a free one if that is taken.
    """

    host: str = LOOPBACK
    port: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DashboardServer:
    """Server that listens.

    Attributes:
        url: URL of the dashboard.
        study_url: URL of the study's note, from which its other pages are one click away.
        is_open: Whether other machines can reach the server.
        server: Underlying WSGI server.
    """

    url: str
    study_url: str
    is_open: bool
    server: WSGIServer

    def serve(self) -> None:
        """Answer requests until interrupted."""
        try:
            self.server.serve_forever()
        finally:
            self.server.server_close()


def dashboard_server(request: StudyRequest, place: Place) -> DashboardServer:
    """Create the server of a study's pages; it listens at once and answers when `serve` is called.

    Raises:
        ConfigError: Optuna-dashboard is not installed, the study does not exist, or the address cannot be used.
    """
    try:
        from optuna_dashboard import wsgi  # noqa: PLC0415 # an extra that may be missing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"needs optuna-dashboard, which is not installed ({error.name} is missing)",
            key="dashboard",
            nearest="pip install 'meshtune[dashboard]'",
        ) from None
    stored = StoredStudies(request.storage)
    study, storage = stored_study(request, stored), stored.opened
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # its plots warn about every degree that never varied
    assert storage is not None, "the study was found in it"
    files = StudyFiles(request)
    view = StudyView(storage, study, request, files)
    server = _listen(place)
    logging.getLogger("optuna_dashboard").addHandler(logging.NullHandler())  # failures are told in one line below
    logging.getLogger("optuna_dashboard").propagate = False
    pages = _allow_only_notes(wsgi(view, artifact_store=files), lambda: _may_write(request.storage))
    server.set_app(_check_host(place.host, _tell_failures(pages)))
    address = server.server_address[0]
    shown = f"[{place.host}]" if ":" in place.host else place.host
    url = f"http://{shown}:{server.server_port}"
    return DashboardServer(
        url=f"{url}/",
        study_url=f"{url}/dashboard/studies/{view.study_id}/note",
        is_open=not ipaddress.ip_address(str(address)).is_loopback,
        server=server,
    )


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server with a thread per request, because browsers open connections before they need them."""

    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that the browser has closed."""


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Suppress the log line of each request."""


def _listen(place: Place) -> _Server:
    ports = [PORT, 0] if place.port is None else [place.port]
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, ports[0], type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise _bad_host(place.host) from None
    for port in ports:
        try:
            return _Server(family, (str(address[0]), port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _bad_host(place.host) from None
            if port != ports[-1]:
                continue
            raise ConfigError(
                f"cannot be used for listening ({error.strerror})",
                key="--port",
                value=port,
                nearest="--port 0 picks a free one",
            ) from None
    raise AssertionError("the last port returns or raises")


def _bad_host(host: str) -> ConfigError:
    return ConfigError("is no address of this machine", key="--host", value=host, nearest=f"--host {LOOPBACK}")


def _may_write(address: StorageAddress) -> bool:
    file = address.file
    return file is None or not file.is_file() or may_write(file)


def _tell_failures(app: App) -> App:
    """Print one line on standard error for each request that fails, in place of a traceback."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        errors = io.StringIO()

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if status.startswith("500"):
                why = errors.getvalue().strip().rpartition("\n")[2]
                asked = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
                say(f"meshtune: {printable(shorten(f'{asked} failed. {why}', 300))}", err=True)
            return start_response(status, headers, *rest)

        # optuna-dashboard fails where a program names no encoding
        return app({"HTTP_ACCEPT_ENCODING": "", **environ, "wsgi.errors": errors}, start)

    return answer


def _allow_only_notes(app: App, may_save: Callable[[], bool]) -> App:
    """Restrict the application to reading, and to writing notes from its own pages."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].rstrip("/")
        if method in {"GET", "HEAD"}:
            return app(environ, start_response)
        status, reason = "403 Forbidden", _REFUSED
        if method == "PUT" and _NOTE.fullmatch(path):
            note = _note_in(environ)  # read first: a client that is still sending would not see a refusal
            origin = environ.get("HTTP_ORIGIN")  # programs that are no browsers send none
            if origin is not None and origin.partition("://")[2] != environ.get("HTTP_HOST"):
                reason = _ELSEWHERE
            elif note is None:
                status, reason = "400 Bad Request", _NOT_A_NOTE
            elif not may_save():
                reason = _ONLY_READ
            else:
                return app({**environ, "wsgi.input": io.BytesIO(note)}, start_response)
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps({"reason": reason}).encode()]

    return answer


def _note_in(environ: Mapping[str, Any]) -> bytes | None:
    """Return the note that a request has brought, or None if it is none."""
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        text: bytes = environ["wsgi.input"].read(min(max(length, 0), MOST_READ_BYTES))
        if not 0 < length <= MOST_NOTE_BYTES or "json" not in environ.get("CONTENT_TYPE", ""):
            return None
        note = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_note = isinstance(note, dict) and type(note.get("version")) is int and isinstance(note.get("body"), str)
    return text if is_note else None


def _check_host(host: str, app: App) -> App:
    """Restrict the application to requests addressed to an IP address, localhost, this machine's name or `host`.

    An IP address cannot be redirected, unlike a name that an attacker controls.
    """
    names = {"localhost", host.lower(), socket.gethostname().lower()}

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, [*headers, *_HEADERS], *rest)

        if (name := _name_in(environ.get("HTTP_HOST", ""))) in names or _is_address(name):
            return app(environ, start)
        start("403 Forbidden", [("Content-Type", "application/json")])
        return [json.dumps({"reason": _NOT_HERE}).encode()]

    return answer


def _name_in(host: str) -> str:
    """Extract the name from a Host header, without its port."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
