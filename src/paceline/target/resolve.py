"""From what the user names a target by to a local folder that transformers and vLLM load."""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.cache import cache_folder
from paceline.errors import TargetError

_PACKAGE_PREFIX = "pkg:"
# A name that no model folder of others has.
_SOURCE_FILE = "paceline-source.json"


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
        return _dequantised(path)
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


def converted_from(folder: Path) -> str | None:
    """Fingerprint of the GGUF file that a folder was made of; None for any other folder. What a
    conversion writes differs between versions of transformers, the file does not."""
    path = folder / _SOURCE_FILE
    return json.loads(path.read_text())["fingerprint"] if path.is_file() else None


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


def _dequantised(path: Path) -> Path:
    """The GGUF file as a plain Hugging Face folder in the cache, made once, atomically."""
    source = fingerprint.of_file(path)
    folder = cache_folder() / "converted" / f"{path.stem}-{source}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert_gguf(path, aside)
        described = {"file": path.name, "fingerprint": source}
        (aside / _SOURCE_FILE).write_text(json.dumps(described, indent=1))
        aside.chmod(0o755)
        os.replace(aside, folder)
    except OSError:
        # Two runs may convert at once: the first rename wins, the folders are equal.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # transformers 5 keeps GGUF weights quantised unless it is told not to.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise TargetError(
            f"{path} needs the packages gguf and accelerate: install paceline[gguf] ({error})"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _make_portable(folder)


def _make_portable(folder: Path) -> None:
    """Let transformers 4 (vLLM 0.16's) read what transformers 5 saved.

    It ignores `rope_parameters` without a word (wrong positions, plausible text), and does not
    know transformers 5's tokenizer class.
    """
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config.pop("quantization_config", None)
    rope = config.get("rope_parameters")
    if rope and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if config.get("dtype"):
        config["torch_dtype"] = config["dtype"]
    config_path.write_text(json.dumps(config, indent=1))
    tokenizer_path = folder / "tokenizer_config.json"
    tokenizer = json.loads(tokenizer_path.read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_path.write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False))
