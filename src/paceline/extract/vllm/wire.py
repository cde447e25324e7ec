"""What travels between the driver and the workers: numbers, strings, bytes, lists and dicts only,
so that vLLM's RPC carries it as it is (never a pickle), and JSON with base64 would too.
"""

import base64
import json
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline import errors
from paceline.contracts import MASK_DTYPE, TOKEN_DTYPE, LayerPlan, TokenSample
from paceline.errors import EngineError, PacelineError
from paceline.extract.guards import Guards
from paceline.extract.sink import Destination
from paceline.store import StoreSpec

Message = dict[str, Any]

_ARRAYS = {"input_ids": TOKEN_DTYPE, "loss_mask": MASK_DTYPE}
# All others are plain values: what a sample is goes into its checksum, so none may be left out.
_PLAIN = tuple(f.name for f in fields(TokenSample) if f.name not in _ARRAYS)


def sample_message(number: int, sample: TokenSample) -> Message:
    """A sample under the number that its request carries."""
    return {
        "number": number,
        **{name: getattr(sample, name).tobytes() for name in _ARRAYS},
        **{name: getattr(sample, name) for name in _PLAIN},
    }


def read_sample(message: Message) -> tuple[int, TokenSample]:
    arrays = {name: np.frombuffer(message[name], dtype).copy() for name, dtype in _ARRAYS.items()}
    sample = TokenSample(**arrays, **{name: message[name] for name in _PLAIN})
    return message["number"], sample


def plan_message(plan: LayerPlan) -> Message:
    return {"aux": list(plan.aux), "last": plan.last}


def read_plan(message: Message) -> LayerPlan:
    return LayerPlan(tuple(message["aux"]), message["last"])


def destination_message(destination: Destination) -> Message:
    guards = destination.guards
    return {
        "folder": str(Path(destination.folder).absolute()),
        "spec": destination.spec.to_dict(),
        "rms_ranges": [list(pair) for pair in guards.rms_ranges],
    }


def read_destination(message: Message) -> Destination:
    spec = StoreSpec.from_dict(message["spec"])
    ranges = tuple((low, high) for low, high in message["rms_ranges"])
    guards = Guards(spec.layers, spec.hidden_size, ranges)
    return Destination(Path(message["folder"]), spec, guards)


def pack(message: Message) -> bytes:
    """A message as JSON, for our own connections between processes."""
    return json.dumps(message, default=_pack_bytes).encode()


def unpack(data: bytes) -> Message:
    return json.loads(data, object_hook=_unpack_bytes)


def _pack_bytes(value: Any) -> Message:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} does not travel in a message")


def _unpack_bytes(value: Message) -> Any:
    return base64.b64decode(value["base64"]) if value.keys() == {"base64"} else value


class WorkerError(Exception):
    """An error as a worker saw it; the cause of what the driver raises."""


def error_message(error: BaseException) -> Message:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def raise_error(message: Message) -> None:
    """Raise a worker's error on the driver's side: paceline's own as what it is, any other as an
    EngineError; either with the worker's traceback as its cause."""
    known = getattr(errors, message["type"], None)
    kind = known if isinstance(known, type) and issubclass(known, PacelineError) else EngineError
    text = message["text"] if kind is not EngineError else f"{message['type']}: {message['text']}"
    cause = WorkerError(f"in a vLLM worker:\n{message['trace']}")
    raise kind(f"the capture inside vLLM failed: {text}") from cause
