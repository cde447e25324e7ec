"""A real S3-compatible server, and a proxy in front of it that misbehaves on demand."""

import http.client
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread

import fsspec
import pytest

BUCKET = "bucket"


@dataclass
class Seen:
    """A request that came to the proxy. received, sent: bytes of the bodies."""

    method: str
    path: str
    query: str
    range: str | None
    received: int = 0
    sent: int = 0

    @property
    def is_data(self) -> bool:
        """Content of a file goes one way or the other."""
        return self.method in ("GET", "PUT") and self.path.count("/") > 1


# What a fault does to one request.
ERROR_403, ERROR_500, ERROR_503, CUT_REQUEST, CUT_RESPONSE, STALL = (
    "403",
    "500",
    "503",
    "cut request",
    "cut response",
    "stall",
)
# A response with one wrong bit in its middle.
FLIP = "flip"
_REFUSALS = {ERROR_403: "AccessDenied", ERROR_500: "InternalError", ERROR_503: "SlowDown"}
# Those that pass.
FAULTS = (ERROR_500, ERROR_503, CUT_REQUEST, CUT_RESPONSE, STALL)


@dataclass
class Proxy:
    """choose: called with the number of a request and the request; names a fault or None."""

    port: int
    choose: Callable[[int, Seen], str | None] = lambda number, seen: None
    seen: list[Seen] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    closed: Event = field(default_factory=Event)

    def note(self, seen: Seen) -> str | None:
        with self.lock:
            self.seen.append(seen)
            number = len(self.seen)
        return self.choose(number, seen)

    def forget(self) -> None:
        self.seen.clear()
        self.choose = lambda number, seen: None

    def puts(self) -> list[str]:
        """Names of the objects that were written, parts of one object each time."""
        return [s.path.removeprefix(f"/{BUCKET}/") for s in self.seen if s.method == "PUT"]


def _handler(proxy: Proxy, server_port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _relay(self) -> None:
            path, _, query = self.path.partition("?")
            seen = Seen(self.command, path, query, self.headers.get("Range"))
            fault = proxy.note(seen)
            if fault == CUT_REQUEST:
                self._hang_up()
                return
            body = self._body()
            seen.received = len(body)
            if fault in _REFUSALS:
                self._refuse(int(fault))
                return
            if fault == STALL:
                proxy.closed.wait()
                self._hang_up()
                return
            status, headers, content = self._ask(body)
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault == FLIP and content:
                at = len(content) // 2
                content = content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :]
            if fault == CUT_RESPONSE:
                self.wfile.write(content[: len(content) // 2])
                self._hang_up()
                return
            self.wfile.write(content)
            seen.sent = len(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            server = http.client.HTTPConnection("127.0.0.1", server_port)
            drop = ("transfer-encoding", "content-length", "expect")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in drop}
            server.request(self.command, self.path, body, headers | {"Connection": "close"})
            answer = server.getresponse()
            content = answer.read()
            server.close()
            return answer.status, answer.getheaders(), content

        def _refuse(self, status: int) -> None:
            code = _REFUSALS[str(status)]
            text = f"<Error><Code>{code}</Code><Message>later</Message></Error>".encode()
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


class _Front(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *address: object) -> None:
        # Clients that are killed hang up.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*address)


@contextmanager
def _server() -> Iterator[int]:
    """moto's server in a process of its own. Yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        # It says so when it listens, and a line for each request from then on.
        for line in process.stderr:
            if b"Running on" in line:
                break
        drain = Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def object_store() -> Iterator[Proxy]:
    """The server behind its proxy, found by s3:// in this process and its children."""
    with _server() as server_port, pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(0)
        front = _Front(("127.0.0.1", 0), _handler(proxy, server_port))
        proxy.port = front.server_address[1]
        Thread(target=front.serve_forever, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        # The library below s3fs would wait for seconds before it tries again itself.
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir(BUCKET)
        try:
            yield proxy
        finally:
            proxy.closed.set()
            front.shutdown()
            front.server_close()
            fsspec.get_filesystem_class("s3").clear_instance_cache()
