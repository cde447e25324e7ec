"""What makes two folders the same target, in named parts, so that a mismatch can say which part
differs. Nothing is loaded: a file counts, or what it says, whatever library reads it."""

import json
from pathlib import Path
from typing import Any

from paceline import fingerprint

# Files that say which ids a text becomes: of tokenizers, SentencePiece, tiktoken, Mistral's own
# form, and code that comes with the target.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tekken.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.bpe",
    "vocab.*",
    "merges.txt",
    "tokenization_*.py",
)
# What these say of ids a tokenizer.json says as well, and tools that save a tokenizer anew leave
# them out or write them differently.
_COUNT_WITHOUT_TOKENIZER_JSON = ("added_tokens.json", "special_tokens_map.json")


def text_fingerprints_of(folder: Path) -> dict[str, str]:
    """`config`: config.json. `tokenizer`: which ids a text becomes and which ids end a turn. The
    chat template is no part of it: `prepare` fingerprints the one that it uses."""
    config = read_json(folder / "config.json")
    for key in ("transformers_version", "_name_or_path"):
        config.pop(key, None)
    return {
        "config": fingerprint.of_json(config),
        "tokenizer": fingerprint.of_json({**_tokenizer(folder), **_ends_of_turn(folder)}),
    }


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where it is not there."""
    return json.loads(path.read_text()) if path.is_file() else {}


def ids_in(value: int | list[int] | tuple[int, ...] | None) -> set[int]:
    """The ids that an `eos_token_id` names, in any of its forms."""
    found = value if isinstance(value, list | tuple) else [value]
    return {i for i in found if i is not None}


def _tokenizer(folder: Path) -> dict[str, Any]:
    patterns, settings = _TOKENIZER_FILES, {}
    if not (folder / "tokenizer.json").is_file():
        patterns += _COUNT_WITHOUT_TOKENIZER_JSON
        settings = read_json(folder / "tokenizer_config.json")
        settings.pop("chat_template", None)
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {"files": fingerprint.of_files(files), "settings": settings}


def _ends_of_turn(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    told = (config, config.get("text_config") or {}, read_json(folder / "generation_config.json"))
    ids = set().union(*(ids_in(part.get("eos_token_id")) for part in told))
    special = read_json(folder / "special_tokens_map.json")
    token = read_json(folder / "tokenizer_config.json").get("eos_token", special.get("eos_token"))
    return {
        "end_ids": sorted(ids),
        "end_token": token.get("content") if isinstance(token, dict) else token,
    }
