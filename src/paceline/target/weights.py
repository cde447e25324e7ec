"""Single tensors out of a checkpoint, without loading the model."""

import json
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from paceline import fingerprint
from paceline.errors import TargetError


class Weights:
    """The weight files of a Hugging Face folder: names, files, single tensors.

    safetensors, whole or sharded; `.bin` files are read with `weights_only=True`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def files(self) -> list[Path]:
        files = sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))
        if not files:
            raise TargetError(f"{self.folder} has no weight files (*.safetensors or *.bin)")
        return files

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (self.folder / name).is_file():
                index = json.loads((self.folder / name).read_text())["weight_map"]
                return {key: self.folder / file for key, file in index.items()}
        return {key: file for file in self.files for key in self._keys(file)}

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
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @staticmethod
    def _keys(file: Path) -> list[str]:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        return list(torch.load(file, map_location="meta", weights_only=True, mmap=True))


def _is_inside_layer_or_tower(key: str) -> bool:
    return ".layers." in key or ".h." in key or _is_of_tower(key)


def _is_of_tower(key: str) -> bool:
    return any(tower in key for tower in ("vision", "visual", "audio", "projector", "image", "mtp"))
