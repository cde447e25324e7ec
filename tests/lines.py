"""A quick line of stages on a tiny random target, for tests of what surrounds the arithmetic."""

import json
from pathlib import Path

import numpy as np

import paceline

from .targets import save_target

TINY_LAYERS = [1, 4, 6]


def write_rows(path: Path, num_rows: int, seed: int = 0, longest: int = 40) -> Path:
    """Rows of exact ids: random prompts and answers that the end-of-turn id 1 closes."""
    generator = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(num_rows):
            size = int(generator.integers(4, longest))
            ids = generator.integers(4, 260, size).tolist()
            half = int(generator.integers(1, size - 2))
            row = {"id": f"r{i}", "prompt_ids": ids[:half], "response_ids": [*ids[half:], 1]}
            file.write(json.dumps(row) + "\n")
    return path


def prepared(folder: Path, num_rows: int = 30, seed: int = 0, heldout_share: float = 0.2) -> Path:
    """Target `folder/target` (made where missing) and data set `folder/prepare`."""
    if not (folder / "target").exists():
        save_target(folder / "target")
    rows = write_rows(folder / "rows.jsonl", num_rows, seed)
    paceline.prepare(
        target=str(folder / "target"),
        data=[str(rows)],
        out=str(folder / "prepare"),
        heldout_share=heldout_share,
    )
    return folder / "prepare"


def extracted(folder: Path, heldout_share: float = 0.2, **options) -> Path:
    """`prepared`, then store `folder/store` and vocabulary `folder/vocab`."""
    data = str(prepared(folder, heldout_share=heldout_share))
    paceline.extract(
        **{
            "data": data,
            "out": str(folder / "store"),
            "layers": TINY_LAYERS,
            "dtype": "float32",
            **options,
        }
    )
    paceline.align(data=data, out=str(folder / "vocab"), draft_vocab_size=64)
    return folder / "store"


def trained(folder: Path, out: str = "draft", **options) -> dict:
    """Train on `extracted`; returns the stage's result."""
    return paceline.train(
        **{
            "store": str(folder / "store"),
            "vocab": str(folder / "vocab"),
            "out": str(folder / out),
            "dtype": "float32",
            "max_steps": 8,
            "batch_rows": 60,
            "micro_batch_tokens": 128,
            "warmup_steps": 2,
            "log_every": 1,
            "checkpoint_every": 2,
            **options,
        }
    )
