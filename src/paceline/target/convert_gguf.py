"""A GGUF file as a plain Hugging Face folder in the cache, which transformers and vLLM load."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.cache import cache_folder
from paceline.errors import TargetError

# A name that no model folder of others has.
_SOURCE_FILE = "paceline-source.json"
# Of what is written here; what an earlier one left in a cache is not taken.
_REVISION = 2


def dequantised(path: Path) -> Path:
    """The folder of a GGUF file, made once, atomically.

    Raises TargetError where a package is missing or transformers makes another tokenizer of it.
    """
    source = fingerprint.of_file(path)
    folder = cache_folder() / "converted" / f"{path.stem}-{source}-{_REVISION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(path, aside)
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


def converted_from(folder: Path) -> str | None:
    """Fingerprint of the GGUF file that a folder was made of; None for any other folder. What a
    conversion writes differs between versions of transformers, the file does not."""
    path = folder / _SOURCE_FILE
    return json.loads(path.read_text())["fingerprint"] if path.is_file() else None


def _convert(path: Path, folder: Path) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # transformers 5 keeps GGUF weights quantised unless it is told not to.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        check_special_tokens(path, tokenizer)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        )
    except ImportError as error:
        raise TargetError(
            f"{path} needs the packages gguf and accelerate: install paceline[gguf] ({error})"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _make_portable(folder)


def check_special_tokens(path: Path, tokenizer: Any) -> None:
    """transformers 4 does not take them from the file: `<|im_start|>` ends SmolLM2's turns then,
    and stands in front of every text."""
    import transformers
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    said = {
        name: field.contents()
        for name in ("eos_token_id", "add_bos_token")
        if (field := fields.get(f"tokenizer.ggml.{name}"))
    }
    end = tokenizer.eos_token_id
    whole, plain = (
        tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False)
    )
    wrong = []
    if end is not None and said.get("eos_token_id", end) != end:
        wrong.append(f"{end} as its end token, not {said['eos_token_id']}")
    if whole[0] != plain[0] and said.get("add_bos_token") is False:
        wrong.append("a begin token in front of texts, and the file says none")
    if wrong:
        raise TargetError(
            f"{path}: transformers {transformers.__version__} reads {'; '.join(wrong)}. Use the "
            "target once where transformers 5 is installed: what it makes of the file is kept in "
            f"{cache_folder()} and serves here too"
        )


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
