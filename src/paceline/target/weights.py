"""Single tensors out of a checkpoint, without loading the model."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline import fingerprint
from paceline.errors import TargetError

# Under these names transformers looks for weights, in this order; in parts, a file of the same name
# and `.index.json` says where each tensor is.
_WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")


class Weights:
    """The weight files of a Hugging Face folder: names, files, single tensors.

    safetensors, whole or sharded; `.bin` files are read with `weights_only=True`. Optimisers,
    adapters and training arguments that lie beside the model's files are none of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def files(self) -> list[Path]:
        """Raises TargetError where there are none, or not all that an index names."""
        files, _ = self._found
        if not files:
            raise TargetError(
                f"{self.folder} has no weight files (model*.safetensors or pytorch_model*.bin)"
            )
        if missing := [file.name for file in files if not file.is_file()]:
            raise TargetError(
                f"{self.folder} lacks {len(missing)} of the {len(files)} weight files that its "
                f"index names: {', '.join(missing[:3])}"
            )
        return files

    @cached_property
    def _found(self) -> tuple[list[Path], dict[str, Path] | None]:
        """The weight files, there or not, and the one that each tensor is in: None where no index
        says so."""
        for whole in map(self.folder.joinpath, _WHOLE_FILES):
            index = whole.with_name(whole.name + ".index.json")
            if whole.is_file():
                return [whole], None
            if index.is_file():
                weight_map = json.loads(index.read_text())["weight_map"]
                file_of = {key: self.folder / file for key, file in weight_map.items()}
                return sorted(set(file_of.values())), file_of
            if parts := sorted(self.folder.glob(f"{whole.stem}*{whole.suffix}")):
                return parts, None
        return [], None

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        return self._found[1] or {key: file for file in self.files for key in _keys(file)}

    def has(self, name: str) -> bool:
        """Whether the checkpoint keeps a parameter, under whatever name `find` knows it by."""
        return bool(self._candidates(name))

    def find(self, name: str) -> str:
        """The checkpoint's own name of a parameter: exact, else the one name with the same end.

        Wrapped models store `language_model.model.norm.weight` for what the model class calls
        `model.language_model.norm.weight`; the tail is what both share. Raises TargetError.
        """
        found = self._candidates(name)
        if len(found) != 1:
            raise TargetError(
                f"{self.folder}: cannot tell which tensor is {name!r}; "
                f"candidates: {found or 'none'}"
            )
        return found[0]

    def _candidates(self, name: str) -> list[str]:
        if name in self._file_of:
            return [name]
        tail = ".".join(name.split(".")[-2:])
        return [
            key
            for key in self._file_of
            if (key == tail or key.endswith("." + tail)) and not _is_inside_layer_or_tower(key)
        ]

    def load(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype."""
        return self._read(self.find(name))

    def _read(self, key: str) -> torch.Tensor:
        path = self._file_of[key]
        with _as_target_error(path):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    return file.get_tensor(key)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[key]

    def load_layer(self, index: int) -> dict[str, torch.Tensor]:
        """Tensors of one decoder layer by their names inside it; empty where layers are not
        numbered `layers.N.`. Towers of wrapped models are left out."""
        marker = f".layers.{index}."
        return {
            key.split(marker, 1)[1]: self._read(key)
            for key in self._file_of
            if marker in key and not _is_of_tower(key)
        }

    def fingerprint(self) -> str:
        return fingerprint.of_files(self.files)

    @property
    def total_bytes(self) -> int | None:
        """Of all files; None where they are not all there."""
        files, _ = self._found
        there = bool(files) and all(file.is_file() for file in files)
        return sum(file.stat().st_size for file in files) if there else None


def _keys(file: Path) -> list[str]:
    with _as_target_error(file):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        return list(torch.load(file, map_location="meta", weights_only=True, mmap=True))


@contextmanager
def _as_target_error(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise TargetError(f"{file} cannot be read as plain tensors: {error}") from error


def _is_inside_layer_or_tower(key: str) -> bool:
    return ".layers." in key or ".h." in key or _is_of_tower(key)


def _is_of_tower(key: str) -> bool:
    return any(tower in key for tower in ("vision", "visual", "audio", "projector", "image", "mtp"))
