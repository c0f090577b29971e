"""The listener of `palestra engine agent`: a service asks for a version of the weights, and is told where it lies on this host.

In: `POST /pull {"version": int, "shared": str?}`. Out: `{"path", "bytes", "seconds", "from"}`, or an error with its code. `GET /status`
says what is here, `GET /health` that it lives. A request waits for the pull, at most PULL_S seconds; requests are bounded in size, time and
number. Requests for one version share one pull.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol

import orjson

from palestra.server.listen import bind, url_of
from palestra.server.types import ServerError

PULL_S = 1800.0
"""Longest wait of a request for its pull, seconds."""
READ_S = 10.0
"""Longest wait for the next bytes of a caller, seconds."""
MOST_BODY = 16_384
MOST_REQUESTS = 32
"""Connections that are answered at once; further ones get 503."""

log = logging.getLogger(__name__)


class PullRefused(ServerError):
    """A version cannot be had; `status` is the HTTP status, `code` its short name."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Puller(Protocol):
    """What brings a version here. One call of `pull` at a time is made."""

    def pull(self, version: int, shared: str | None) -> Mapping[str, Any]:
        """The answer of /pull.

        Raises:
            PullRefused: it cannot be had.
        """

    def status(self) -> Mapping[str, Any]:
        """The answer of /status."""


class Pulls:
    """Runs pulls one after another, and one for all who want the same."""

    def __init__(self, puller: Puller, wait_s: float = PULL_S) -> None:
        self._puller, self._wait_s = puller, wait_s
        self._running: dict[tuple[int, str | None], Future[Mapping[str, Any]]] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def pull(self, version: int, shared: str | None) -> Mapping[str, Any]:
        """The puller's answer, its own or another caller's for the same.

        Raises:
            PullRefused: the puller's, or 503 after `wait_s` seconds.
        """
        key = (version, shared)
        with self._lock:
            found = self._running.get(key)
            future: Future[Mapping[str, Any]] = Future() if found is None else found
            if found is None:
                self._running[key] = future
        if found is None:
            self._run(key, future)
        try:
            return future.result(self._wait_s)
        except TimeoutError:
            raise self._busy(version) from None

    def running(self) -> list[int]:
        """Versions that are being pulled or wait for their turn."""
        with self._lock:
            return sorted(version for version, _ in self._running)

    def _run(self, key: tuple[int, str | None], future: Future[Mapping[str, Any]]) -> None:
        try:
            if not self._turn.acquire(timeout=self._wait_s):
                raise self._busy(key[0])
            try:
                future.set_result(self._puller.pull(*key))
            finally:
                self._turn.release()
        except PullRefused as error:
            future.set_exception(error)
        except Exception as error:  # it is raised from the future, in every caller's thread
            log.exception("version %d was not pulled", key[0])
            future.set_exception(error)
        finally:
            with self._lock:
                del self._running[key]

    def _busy(self, version: int) -> PullRefused:
        return PullRefused(f"version {version} is not here after {self._wait_s:.0f} s: the disk is slow", 503, "busy")


class WeightsListener:
    """Serves while the context is open."""

    def __init__(
        self,
        puller: Puller,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        wait_s: float = PULL_S,
    ) -> None:
        """`token`: what callers of /pull and /status must bear; None: nothing.

        Raises:
            OSError: the port is taken.
        """
        self._sock = bind(host, port)
        self._server = _Server(self._sock, _Desk(puller, Pulls(puller, wait_s), token))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="weights-listener")

    @property
    def url(self) -> str:
        """Base URL."""
        return url_of(self._sock)

    def __enter__(self) -> WeightsListener:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Desk:
    """Routes: a request's parts to a status and an answer."""

    def __init__(self, puller: Puller, pulls: Pulls, token: str | None) -> None:
        self._puller, self._pulls, self._token = puller, pulls, token

    def answer(self, method: str, path: str, bearer: str, body: bytes) -> tuple[int, Mapping[str, Any]]:
        try:
            if (method, path) == ("GET", "/health"):
                return 200, {"status": "ok"}
            if self._token is not None and not hmac.compare_digest(bearer.encode(), f"Bearer {self._token}".encode()):
                raise PullRefused("a token is needed: Authorization: Bearer TOKEN", 401, "unauthorized")
            if (method, path) == ("GET", "/status"):
                return 200, {**self._puller.status(), "pulling": self._pulls.running()}
            if (method, path) == ("POST", "/pull"):
                return 200, self._pulls.pull(*_wanted(body))
            raise PullRefused(f"no {method} {path}; there are GET /health, GET /status, POST /pull", 404, "not_found")
        except PullRefused as error:
            return error.status, {"error": {"message": str(error), "code": error.code}}
        except Exception as error:  # the caller is told, whatever it is
            log.exception("%s %s failed", method, path)
            return 500, {"error": {"message": f"{type(error).__name__}: {error}", "code": "internal"}}


def _wanted(body: bytes) -> tuple[int, str | None]:
    try:
        said = orjson.loads(body)
        version, shared = said["version"], said.get("shared")
        if type(version) is not int or not 0 <= version < 2**53 or not isinstance(shared, str | None):
            raise ValueError("version must be a whole number, shared a text")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PullRefused(f'wanted {{"version": N, "shared": FOLDER}}: {reason}', 400, "invalid_request") from None
    return version, shared


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, sock: socket.socket, desk: _Desk) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.desk = sock, desk
        self.free = threading.BoundedSemaphore(MOST_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called for each connection."""
        if not self.free.acquire(blocking=False):
            request.settimeout(1.0)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The connection's own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no news."""
        log.debug("a connection of %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_S

    def do_GET(self) -> None:
        self._say(*self.server.desk.answer("GET", self.path, self.headers.get("Authorization", ""), b""))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BODY:
            message = f"a body of at most {MOST_BODY} bytes with a Content-Length is wanted"
            self._say(413, {"error": {"message": message, "code": "too_large"}})
            return
        body = self.rfile.read(int(length))
        self._say(*self.server.desk.answer("POST", self.path, self.headers.get("Authorization", ""), body))

    def _say(self, status: int, said: Mapping[str, Any]) -> None:
        body = orjson.dumps(dict(said))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silent: what matters is logged where it happens."""
