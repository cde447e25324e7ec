"""Several vLLM engines that take samples from one queue: data parallelism without a router.

Each is a process with GPUs of its own (or a Ray actor). One that dies gives its samples back: what
it had published stays, the rest goes to the others.
"""

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Protocol

import numpy as np

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.engine import EngineInfo
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.vllm import wire
from paceline.extract.vllm.replica import PULL_SAMPLES
from paceline.extract.vllm.settings import VllmSettings
from paceline.extract.vllm.wire import Message
from paceline.store import published_ids
from paceline.vllm_orphans import this_process

logger = logging.getLogger(__name__)

_ACCEPT_POLL_S = 1.0
_TELL_EVERY_S = 30.0
# Of waiting for the next replica to call, which it does before it loads anything. A cluster may
# have to start machines for it.
_START_TIMEOUT_S = 1800.0


class Host(Protocol):
    """Where a replica's process lives."""

    name: str

    def needs(self) -> str:
        """What it waits for where it has not started yet."""
        ...

    def alive(self) -> bool: ...

    def fate(self) -> str:
        """How it ended, to follow its name; asked when it has ended or its connection is lost."""
        ...

    def end(self) -> None:
        """Kill it with all that it started; returns when none of it can publish any more."""
        ...


# Starts replica number i, which is to call (port, key); returns its host.
Launcher = Callable[[int, int, bytes], Host]


class _Member:
    """A live replica: its connection and the samples that it has been given."""

    def __init__(self, host: Host, connection: Connection) -> None:
        self.host = host
        self.connection = connection
        self.assigned: dict[str, TokenSample] = {}

    def send(self, message: Message) -> None:
        self.connection.send_bytes(wire.pack(message))

    def receive(self) -> Message:
        return wire.unpack(self.connection.recv_bytes())


class ReplicaPool:
    """See `extract.engine.Engine`: the same, by `count` engines."""

    def __init__(
        self,
        count: int,
        launch: Launcher,
        settings: VllmSettings,
        num_layers: int,
        dtype: str,
        address: str = "127.0.0.1",
    ) -> None:
        self._members: list[_Member] = []
        self._hosts: list[Host] = []
        self._lost: list[str] = []
        key = secrets.token_bytes(32)
        try:
            with socket.create_server((address, 0), backlog=count) as server:
                server.settimeout(_ACCEPT_POLL_S)
                for number in range(count):
                    self._hosts.append(launch(number, server.getsockname()[1], key))
                while len(self._members) < count:
                    self._members.append(self._accept(server, key))
            self._start(settings, num_layers, dtype)
            ready = [self._expect(member, "ready") for member in self._members]
        except BaseException:
            self.close()
            raise
        self.info = EngineInfo(
            "vllm", ready[0]["version"], dtype, {**ready[0]["settings"], "workers": count}
        )

    def capture(
        self,
        samples: Iterable[TokenSample],
        plan: LayerPlan,
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> None:
        order = {
            "kind": "capture",
            "plan": wire.plan_message(plan),
            "destination": wire.destination_message(destination),
        }
        queue = _Queue(destination.missing(samples))
        while True:
            failures = self._round(order, queue, destination, on_tokens)
            if failures:
                wire.raise_error(failures[0])
            # What a dead replica gave back after the others had ended is shared out once more; with
            # none left alive, the next round says so.
            if queue.empty:
                return

    def greedy(self, prompts: Sequence[np.ndarray], num_tokens: int) -> list[list[int]]:
        packed = [np.asarray(p, np.int32).tobytes() for p in prompts]
        member = self._members[0]
        member.send({"kind": "greedy", "prompts": packed, "num_tokens": num_tokens})
        return self._expect(member, "answers")["answers"]

    def close(self) -> None:
        for member in self._members:
            member.connection.close()
        for host in self._hosts:
            host.end()
        self._members, self._hosts = [], []

    def _accept(self, server: socket.socket, key: bytes) -> _Member:
        """The next replica that calls."""
        connection = Connection(self._next_caller(server).detach())
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        hello = wire.unpack(connection.recv_bytes())
        return _Member(self._hosts[hello["replica"]], connection)

    def _next_caller(self, server: socket.socket) -> socket.socket:
        """EngineError where a replica has ended before it called, or none calls for long."""
        began = told = time.monotonic()
        while True:
            try:
                return server.accept()[0]
            except TimeoutError:
                self._refuse_dead()
            now = time.monotonic()
            if now - began > _START_TIMEOUT_S:
                raise EngineError(
                    f"after {(now - began) / 60:.0f} minutes {self._absent()}. Lower `workers`, or "
                    "make room, and run the same command again."
                )
            if now - told > _TELL_EVERY_S:
                told = now
                logger.warning("%s", self._absent())

    def _refuse_dead(self) -> None:
        if dead := [host for host in self._hosts if not host.alive()]:
            fates = "; ".join(f"{host.name} {host.fate()}" for host in dead)
            raise EngineError(f"ended while starting: {fates}")

    def _absent(self) -> str:
        here = [member.host for member in self._members]
        waiting = [f"{h.name} for {h.needs()}" for h in self._hosts if h not in here]
        return f"{len(waiting)} of {len(self._hosts)} engines still wait: {'; '.join(waiting)}"

    def _start(self, settings: VllmSettings, num_layers: int, dtype: str) -> None:
        for member in self._members:
            member.send(
                {
                    "arguments": settings.arguments,
                    "scratch": str(settings.scratch) if settings.scratch else None,
                    "replica": self._hosts.index(member.host),
                    "driver": settings.driver or this_process(),
                    "writers": settings.writers,
                    "num_layers": num_layers,
                    "dtype": dtype,
                }
            )

    def _round(
        self,
        order: Message,
        queue: "_Queue",
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> list[Message]:
        """Let all live replicas capture until the queue is empty; errors that they told of."""
        if not self._members:
            raise EngineError(
                f"all vLLM workers are gone ({'; '.join(self._lost)}); what was published stays: "
                "run the same command to go on"
            )
        failures: list[Message] = []
        active = {member.connection: member for member in self._members}
        for member in self._members:
            member.assigned.clear()
            self._try(member, lambda m=member: m.send(order))
        while active:
            for connection in wait(list(active)):
                member = active[connection]
                try:
                    message = member.receive()
                    if message["kind"] == "more":
                        batch = [] if failures else queue.take(PULL_SAMPLES)
                        member.assigned.update({s.sample_id: s for s in batch})
                        member.send({"samples": [wire.sample_message(0, s) for s in batch]})
                    elif message["kind"] == "tokens":
                        on_tokens(message["count"])
                    else:
                        del active[connection]
                        failures += [message["error"]] if message["kind"] == "error" else []
                except (EOFError, OSError):
                    del active[connection]
                    self._bury(member, queue, destination)
        return failures

    def _try(self, member: _Member, action: Callable[[], None]) -> None:
        """A replica that is dead already is buried when its connection is next looked at."""
        try:
            action()
        except OSError as error:
            logger.warning("%s: %s", member.host.name, error)

    def _bury(self, member: _Member, queue: "_Queue", destination: Destination) -> None:
        """A replica has died: make sure that all of it is gone, then give back what it owed."""
        fate = f"{member.host.name} {member.host.fate()}"
        member.host.end()
        member.connection.close()
        self._members.remove(member)
        self._lost.append(fate)
        settled = published_ids(destination.folder)
        settled |= {e["sample_id"] for e in read_lines(destination.folder, QUARANTINE_PATTERN)}
        owed = [s for name, s in member.assigned.items() if name not in settled]
        logger.warning("%s; %d samples go back into the queue", fate, len(owed))
        queue.give_back(owed)

    def _expect(self, member: _Member, kind: str) -> Message:
        try:
            message = member.receive()
        except (EOFError, OSError) as error:
            raise EngineError(f"{member.host.name} {member.host.fate()}") from error
        if message["kind"] == "error":
            wire.raise_error(message["error"])
        if message["kind"] != kind:
            raise EngineError(f"{member.host.name} said {message['kind']!r}, not {kind!r}")
        return message


class _Queue:
    """The samples that nobody has yet; what is given back comes first."""

    def __init__(self, samples: Iterable[TokenSample]) -> None:
        self._source = iter(samples)
        self._exhausted = False
        self._returned: deque[TokenSample] = deque()

    @property
    def empty(self) -> bool:
        return self._exhausted and not self._returned

    def take(self, count: int) -> list[TokenSample]:
        taken = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
        wanted = count - len(taken)
        fresh = list(islice(self._source, wanted))
        self._exhausted |= len(fresh) < wanted
        return taken + fresh

    def give_back(self, samples: Iterable[TokenSample]) -> None:
        self._returned.extend(samples)
