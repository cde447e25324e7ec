"""Tells every rank of a training at once when one of them fails or dies.

A rank that waits in a collective for one that is gone waits until a time-out of minutes. So each
rank keeps a connection to the first one: the kernel closes it when its process ends, however it
ends (no heartbeat that a busy process could miss), and a rank that fails says why before it goes.
"""

import json
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Event, Lock, Thread

_CONNECT_S = 60.0
_HELLO = 8  # bytes of a rank's number, by which it introduces itself


@dataclass(frozen=True)
class Failure:
    """The first one that was heard of."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"


class Lifeline:
    """One rank's end. peers: of the first rank all others, of another one the first.

    failure: the first one that was heard of another rank; on_failure is called then, once, by a
    thread of its own. closed: set when this rank has parted.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, socket.socket],
        on_failure: Callable[["Lifeline"], None],
    ) -> None:
        self.failure: Failure | None = None
        self.closed = Event()
        self._rank, self._peers, self._on_failure = rank, peers, on_failure
        self._heard, self._sending = Event(), Lock()
        self._wake, self._woken = socket.socketpair()
        self._thread = Thread(target=self._listen, name="lifeline", daemon=True)
        self._thread.start()

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """What failed elsewhere, if it is heard of within so many seconds."""
        self._heard.wait(seconds)
        return self.failure

    def fail(self, text: str) -> None:
        """Tell all others why this rank ends."""
        self._send(self._peers, Failure(self._rank, text))

    def close(self) -> None:
        """Part in peace."""
        self._send(self._peers, None)
        self.closed.set()
        self._wake.send(b".")
        self._thread.join()
        for connection in (*self._peers.values(), self._wake, self._woken):
            connection.close()

    def _send(self, peers: dict[int, socket.socket], failure: Failure | None) -> None:
        line = json.dumps(failure and asdict(failure)).encode() + b"\n"
        with self._sending:
            for connection in peers.values():
                with suppress(OSError):  # who is gone needs no news
                    connection.sendall(line)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, _Peer(rank))
            while not self.closed.is_set():
                for key, _ in selector.select():
                    if key.data is not None and not self._attend(key.fileobj, key.data):
                        selector.unregister(key.fileobj)

    def _attend(self, connection: socket.socket, peer: "_Peer") -> bool:
        """Take in what a peer says. False: it will say no more."""
        try:
            said = connection.recv(1 << 16)
        except OSError:
            said = b""
        *lines, peer.rest = (peer.rest + said).split(b"\n")
        for line in lines:
            if (values := json.loads(line)) is None:
                return False
            self._hear(Failure(**values), peer.rank)
        if not said:
            self._hear(Failure(peer.rank, _DEAD), peer.rank)
        return bool(said)

    def _hear(self, failure: Failure, source: int) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        # The first rank is the one that all others know.
        self._send({r: c for r, c in self._peers.items() if r != source}, failure)
        self._heard.set()
        Thread(target=self._on_failure, args=(self,), daemon=True).start()


_DEAD = "ended without a word (killed? out of memory?)"


@dataclass
class _Peer:
    """rest: what it said of a line that is not whole yet. A line of null is its farewell."""

    rank: int
    rest: bytes = b""


def listen() -> socket.socket:
    """Of the first rank: where the others will connect."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept_all(listener: socket.socket, num_ranks: int) -> dict[int, socket.socket]:
    """The connections of all other ranks by their numbers. Raises TimeoutError where one does not
    come."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(_CONNECT_S)
    with listener:
        while len(found) < num_ranks - 1:
            connection, _ = listener.accept()
            connection.settimeout(_CONNECT_S)
            rank = int.from_bytes(connection.recv(_HELLO, socket.MSG_WAITALL))
            if not 0 < rank < num_ranks:
                connection.close()  # not one of us: any program may knock at a port
                continue
            connection.settimeout(None)
            found[rank] = connection
    return found


def connect(host: str, port: int, rank: int) -> dict[int, socket.socket]:
    """The connection to the first rank."""
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.settimeout(None)
    connection.sendall(rank.to_bytes(_HELLO))
    return {0: connection}
