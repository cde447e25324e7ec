"""One of several vLLM engines that share the work: what runs in its process.

It pulls samples from the driver over a connection, so that a fast engine takes more, and captures
them as a single engine does. Started as `python -m paceline.extract.vllm.replica`, or as a Ray
actor; either way it calls the driver.
"""

import os
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import numpy as np

from paceline.contracts import MANIFEST_NAME, TokenSample
from paceline.errors import EngineError
from paceline.extract.vllm import wire
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.settings import VllmSettings
from paceline.extract.vllm.wire import Message
from paceline.vllm_orphans import end_with

# Samples that travel at a time: few, so that the queue's end is shared out evenly.
PULL_SAMPLES = 2
KEY_VARIABLE = "PACELINE_REPLICA_KEY"


class Replica:
    """Serves the driver until it says "close". If the driver is gone the process ends at once:
    what it has not published will be made again, and must not be published twice."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def serve(self) -> None:
        setup = self._receive()
        # A model that is being loaded heeds no connection.
        end_with([setup["driver"]])
        try:
            _refuse_unseen("the target's folder", Path(setup["arguments"]["model"]))
            engine = VllmEngine(
                VllmSettings(
                    arguments=setup["arguments"],
                    scratch=Path(setup["scratch"]) if setup["scratch"] else None,
                    replica=setup["replica"],
                    driver=setup["driver"],
                    writers=setup["writers"],
                ),
                setup["num_layers"],
                setup["dtype"],
            )
        except Exception as error:
            self._send({"kind": "error", "error": wire.error_message(error)})
            return
        info = engine.info
        self._send({"kind": "ready", "version": info.version, "settings": info.settings})
        try:
            while (order := self._receive())["kind"] != "close":
                self._obey(engine, order)
        finally:
            engine.close()

    def _obey(self, engine: VllmEngine, order: Message) -> None:
        try:
            if order["kind"] == "greedy":
                prompts = [np.frombuffer(p, np.int32) for p in order["prompts"]]
                answers = engine.greedy(prompts, order["num_tokens"])
                self._send({"kind": "answers", "answers": answers})
                return
            destination = wire.read_destination(order["destination"])
            # A writer would make the folder where it is missing, on a disk that nobody looks at.
            _refuse_unseen("the store's manifest", destination.folder / MANIFEST_NAME)
            engine.capture(
                self._pull(),
                wire.read_plan(order["plan"]),
                destination,
                lambda count: self._send({"kind": "tokens", "count": count}),
            )
        except Exception as error:
            self._send({"kind": "error", "error": wire.error_message(error)})
        else:
            self._send({"kind": "finished"})

    def _pull(self) -> Iterator[TokenSample]:
        while True:
            self._send({"kind": "more"})
            samples = self._receive()["samples"]
            if not samples:
                return
            for message in samples:
                yield wire.read_sample(message)[1]

    def _send(self, message: Message) -> None:
        try:
            self._connection.send_bytes(wire.pack(message))
        except OSError:
            os._exit(1)

    def _receive(self) -> Message:
        try:
            return wire.unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _refuse_unseen(what: str, path: Path) -> None:
    if not path.exists():
        raise EngineError(
            f"{what}, {path}, is not to be seen on {socket.gethostname()}: engines on several "
            "machines need it under the same path on each of them"
        )


def call_driver(host: str, port: int, key: bytes, number: int) -> None:
    """Connect to the driver, say which replica this is, and serve it."""
    # vLLM's own engine process would outlive this one when it is killed, and hold its connection.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with Client((host, port), authkey=key) as connection:
        connection.send_bytes(wire.pack({"kind": "hello", "replica": number}))
        Replica(connection).serve()


if __name__ == "__main__":
    secret = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    call_driver(sys.argv[1], int(sys.argv[2]), secret, int(sys.argv[3]))
