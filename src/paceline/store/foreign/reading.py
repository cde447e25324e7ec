"""Opens a file of another tool without running anything that is in it.

What a file is, its first bytes say, not its name: safetensors, what torch.save wrote, or either
under gzip.
"""

import gzip
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from paceline.errors import DataError

_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
# A safetensors file begins with the length of its header, which is a JSON object.
_LENGTH_BYTES = 8
_REFUSED = re.compile(r"Unsupported [a-z]+: [^\s,]+(?: [\w.]+)?")


class ForeignFileError(DataError):
    """A file of another tool that cannot be taken. `reason`: a few words to count by."""

    def __init__(self, path: Path, reason: str, detail: str = "") -> None:
        super().__init__(f"{path}: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason


def read_values(path: Path) -> dict[str, Any]:
    """What a file holds: names to tensors (and lists of them).

    torch.save files are read with weights_only=True, which builds plain tensors and containers and
    refuses all else before anything of it is run. Raises ForeignFileError.
    """
    try:
        values = _load(path)
    except OSError as error:
        # gzip's own complaints are of this class too.
        raise ForeignFileError(path, "cannot be read", str(error)) from error
    except pickle.UnpicklingError as error:
        raise ForeignFileError(
            path, "holds more than plain tensors and was not run", _what_was_refused(error)
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, zlib.error) as error:
        raise ForeignFileError(path, "is damaged", _first_line(error)) from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ForeignFileError(path, "holds no names and tensors", type(values).__name__)
    return values


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(9)
        file.seek(0)
        if not start.startswith(_GZIP):
            return _load_plain(path, start, file)
    with gzip.open(path) as packed:
        data = packed.read()
    return _load_plain(path, data[:9], io.BytesIO(data))


def _load_plain(path: Path, start: bytes, file: IO[bytes]) -> Any:
    if start.startswith((_ZIP, _PICKLE)):
        # Mapped, rows that are not wanted are never read. torch maps files by name alone, and goes
        # by the name's ending then.
        is_mapped = start.startswith(_ZIP) and path.suffix in (".pt", ".ckpt")
        source = path if is_mapped else file
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    if start[_LENGTH_BYTES:] == b"{":
        return load(file.read())
    raise ForeignFileError(path, "is neither safetensors nor of torch.save")


def read_config(path: Path) -> dict[str, Any]:
    """A `data_config.json`; an empty one where there is none. Raises DataError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} is not a JSON object")
    return values


def _what_was_refused(error: pickle.UnpicklingError) -> str:
    """torch's own words without its advice, which is to run the file."""
    found = _REFUSED.search(str(error))
    return found[0] if found else ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
