"""A store as the first builds wrote it, made from one of today with json and struct alone: shards
whose samples have no `finished`, an index that does not say of which store, a bare manifest."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline import fingerprint
from paceline.store.files import INDEX_NAME, shard_numbers, shard_path

_DIGITS = 32
EARLY_COLUMNS = ("sample_id", "conversation_id", "source", "split")


def make_early(folder: Path, in_shards: bool = True) -> None:
    """in_shards: shards too; else only the index and the manifest."""
    if in_shards:
        for number in shard_numbers(folder):
            _edit(shard_path(folder, number), _without_finished)
    _edit(folder / INDEX_NAME, _without_content)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("checksum", None)
    if in_shards:
        manifest["fingerprint"] = _fingerprint(folder, manifest)
    path.write_text(json.dumps(manifest))


def read_shard(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A safetensors file by hand: header and the bytes of each tensor."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    tensors = {
        name: body[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return header, tensors


def _edit(path: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> None:
    header, tensors = read_shard(path)
    metadata = header["__metadata__"]
    change(metadata, tensors)
    end = 0
    for name in sorted(tensors, key=lambda n: header[n]["data_offsets"][0]):
        entry = header[name]
        if len(entry["shape"]) == 1 and entry["dtype"] == "U8":
            entry["shape"] = [len(tensors[name])]
        entry["data_offsets"] = [end, end + len(tensors[name])]
        end += len(tensors[name])
    order = sorted(tensors, key=lambda n: header[n]["data_offsets"][0])
    sums = {name: xxhash.xxh3_128_hexdigest(tensors[name]) for name in tensors}
    metadata["checksums"] = json.dumps(sums)
    metadata["header_checksum"] = "0" * _DIGITS
    text = json.dumps(header).encode().ljust(8192 - 8)
    blank = struct.pack("<Q", len(text)) + text
    sealed = blank.replace(b"0" * _DIGITS, xxhash.xxh3_128_hexdigest(blank).encode(), 1)
    path.write_bytes(sealed + b"".join(tensors[name] for name in order))


def _without_finished(metadata: dict[str, Any], tensors: dict[str, bytes]) -> None:
    columns = json.loads(tensors["samples"])
    early = {name: columns[name] for name in EARLY_COLUMNS}
    tensors["samples"] = json.dumps(early).encode()
    # These covered other words; any bytes do, since nobody can compare them any more.
    old = tensors["sample_checksums"]
    tensors["sample_checksums"] = bytes(b ^ 0x5A for b in old)


def _without_content(metadata: dict[str, Any], tensors: dict[str, bytes]) -> None:
    del metadata["spec"], metadata["content"]


def _fingerprint(folder: Path, manifest: dict[str, Any]) -> str:
    """As the first builds named a store's content."""
    pieces, spec = [], None
    for number in shard_numbers(folder):
        header, tensors = read_shard(shard_path(folder, number))
        spec = json.loads(header["__metadata__"]["spec"])
        pieces.append(np.frombuffer(tensors["sample_checksums"], np.uint8).reshape(-1, 16))
    rows = sorted(row.tobytes() for row in np.concatenate(pieces))
    content = fingerprint.of_json([spec, fingerprint.of_bytes(b"".join(rows))])
    shaping = [manifest[name] for name in ("stage", "schema", "inputs", "options")]
    return fingerprint.of_json([*shaping, content])
