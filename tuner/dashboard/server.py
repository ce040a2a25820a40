"""The server of a study's pages: optuna-dashboard's own, over `StudyView`, for reading and for notes alone.

There is no login, so that what a browser may be made to do is what counts. A page from elsewhere cannot write: browsers
ask first (CORS, an OPTIONS request) before they send a PUT elsewhere, and that is refused. Nor can it pass for one of
ours by a name of its own that leads here (DNS rebinding): a request must name the server as a user does.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import optuna

from hardware.io.errors import ConfigError
from tuner.dashboard.artifacts import StudyFiles
from tuner.dashboard.view import StudyView
from tuner.run.loop import stored_study
from tuner.storage.opening import load_study, open_store
from tuner.study_file.config import StudyConfig

PORT = 8080
"""optuna-dashboard's own."""

LOOPBACK = "127.0.0.1"

_NOTE = re.compile(r"/api/studies/\d+(/\d+)?/note")
_REFUSED = "meshtune dashboard shows studies and keeps notes; nothing else is changed from here"
_NOT_HERE = (
    "meshtune dashboard does not answer to this name; use localhost, an IP address, or start it with --host NAME"
)

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::\d+)?")

_HEADERS = (("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "SAMEORIGIN"))
"""A log is never taken for a page, and no other site shows ours in a frame, where clicks are stolen."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the pages are to be served.

    Attributes:
        host: Name or address of this machine.
        port: 0 for a free one; None for 8080, or a free one where that is taken.
    """

    host: str = LOOPBACK
    port: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DashboardServer:
    """A server that listens.

    Attributes:
        url: Of the dashboard.
        study_url: Of the study's page.
        is_open: Whether other machines can reach it.
        server: What serves.
    """

    url: str
    study_url: str
    is_open: bool
    server: WSGIServer

    def serve(self) -> None:
        """Answers until it is interrupted."""
        try:
            self.server.serve_forever()
        finally:
            self.server.server_close()


def dashboard_server(config: StudyConfig, place: Place) -> DashboardServer:
    """The server of a study's pages; it listens, and `serve` answers.

    Raises:
        ConfigError: optuna-dashboard is not installed, there is no such study, or it cannot listen there.
    """
    try:
        from optuna_dashboard import wsgi  # noqa: PLC0415 # an extra that may be missing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"needs optuna-dashboard, which is not installed ({error.name} is missing)",
            key="dashboard",
            nearest="pip install 'meshtune[dashboard]'",
        ) from None
    stored_study(config)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # its plots warn of every degree that never varied
    storage = open_store(config.storage).storage
    study = load_study(storage, config.name)
    assert study is not None, "the study was there a moment ago"
    files = StudyFiles(config)
    view = StudyView(storage, study, config, files)
    server = _listening(place)
    server.set_app(_for_users_of(place.host, _notes_alone(wsgi(view, artifact_store=files))))
    address = server.server_address[0]
    shown = f"[{place.host}]" if ":" in place.host else place.host
    url = f"http://{shown}:{server.server_port}"
    return DashboardServer(
        url=f"{url}/",
        study_url=f"{url}/dashboard/studies/{view.study_id}",
        is_open=not ipaddress.ip_address(str(address)).is_loopback,
        server=server,
    )


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, because browsers open connections before they need them."""

    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone needs no answer."""


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


def _listening(place: Place) -> _Server:
    ports = [PORT, 0] if place.port is None else [place.port]
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, ports[0], type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise _no_place(place.host) from None
    for port in ports:
        try:
            return _Server(family, (str(address[0]), port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _no_place(place.host) from None
            if port != ports[-1]:
                continue
            raise ConfigError(
                f"cannot be listened on ({error.strerror})",
                key="--port",
                value=port,
                nearest="--port 0 takes a free one",
            ) from None
    raise AssertionError("the last port returns or raises")


def _no_place(host: str) -> ConfigError:
    return ConfigError("is no address of this machine", key="--host", value=host, nearest=f"--host {LOOPBACK}")


def _notes_alone(app: App) -> App:
    """The application without what it could change of a study but its notes."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].rstrip("/")
        if method in {"GET", "HEAD"} or (method == "PUT" and _NOTE.fullmatch(path)):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "application/json")])
        return [json.dumps({"reason": _REFUSED}).encode()]

    return answer


def _for_users_of(host: str, app: App) -> App:
    """The application for requests that name it by an address, as localhost, as this machine or as `host`.

    An address cannot be made to lead elsewhere, as other people's names can.
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
    """A Host header without its port."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
