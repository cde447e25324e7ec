"""From what the user names a target by to a local folder that transformers and vLLM load."""

import importlib.util
from pathlib import Path

from paceline.errors import TargetError
from paceline.target.convert_gguf import dequantised

_PACKAGE_PREFIX = "pkg:"


def resolve(reference: str, revision: str | None = None, with_weights: bool = True) -> Path:
    """A local folder with config, weights and tokenizer for a target reference.

    `reference`: a folder, a `.gguf` file, `pkg:PACKAGE/FILE` inside an installed package, or a
    Hugging Face id (fetched by huggingface_hub; without its weights where `with_weights` is
    false). A GGUF file is dequantised once into the cache.
    Raises TargetError that says what was looked for.
    """
    if not reference:
        raise TargetError("no target given: pass `target` (a folder, a Hub id or pkg:PACKAGE/FILE)")
    if reference.startswith(_PACKAGE_PREFIX):
        path = _inside_package(reference)
    else:
        path = Path(reference).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return dequantised(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"{path} has no config.json: it is not a Hugging Face model folder")
        return path.resolve()
    if not _may_be_hub_id(reference):
        raise TargetError(f"target {reference!r}: no such folder or .gguf file")
    return _from_hub("target", reference, revision, with_weights)


def resolve_draft(reference: str) -> Path:
    """The folder of a draft: as named, or fetched where it is none here and may be a Hugging Face
    id. Raises TargetError where it cannot be fetched."""
    path = Path(reference).expanduser()
    if path.exists() or not _may_be_hub_id(reference):
        return path
    return _from_hub("draft", reference)


def _may_be_hub_id(reference: str) -> bool:
    is_path = reference.startswith((_PACKAGE_PREFIX, ".", "/", "~"))
    return not is_path and reference.count("/") == 1


def _inside_package(reference: str) -> Path:
    package, _, name = reference.removeprefix(_PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(f"target {reference!r}: package {package!r} is not installed")
    folder = Path(spec.submodule_search_locations[0])
    path = folder / name
    if not path.exists():
        models = sorted(p.name for p in folder.glob("*.gguf"))
        raise TargetError(f"target {reference!r}: no {name!r} in {package}; it has {models}")
    return path


def _from_hub(
    what: str, model_id: str, revision: str | None = None, with_weights: bool = True
) -> Path:
    from huggingface_hub import snapshot_download

    skipped = ["*.pth", "*.gguf", "original/*", "*.msgpack", "*.h5"]
    if not with_weights:
        skipped += ["*.safetensors", "*.bin", "*.pt"]
    try:
        return Path(snapshot_download(model_id, revision=revision, ignore_patterns=skipped))
    except Exception as error:  # the hub client has no common base class for its errors
        raise TargetError(
            f"{what} {model_id!r} is no local folder and could not be fetched from the Hub: {error}"
        ) from error
