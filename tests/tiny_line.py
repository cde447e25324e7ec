"""A whole line on a tiny random target: seconds, but every stage and every file is real."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.targets import save_target

_WORDS = ("red", "blue", "sky", "tree", "bird", "lamp", "rain", "door")


def save_tiny_target(folder: Path, seed: int = 0) -> Path:
    """As many logits as the tokenizer has tokens: a random model says every id."""
    return save_target(folder, seed=seed, vocab_size=260)


def write_prompts(path: Path, count: int = 32) -> Path:
    """Prompts of two sources."""
    rows = [
        {
            "id": f"q{i}",
            "source": ("colours", "things")[i % 2],
            "messages": [{"role": "user", "content": f"{_WORDS[i % 8]} {_WORDS[i // 8]} {i}"}],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_values(folder: Path, target: Path) -> dict[str, Any]:
    """A recipe whose run takes seconds; `folder` holds its prompts and its run."""
    return {
        "target": str(target),
        "run_dir": str(folder / "run"),
        "generate": {
            "data": [str(write_prompts(folder / "prompts.jsonl"))],
            "max_new_tokens": 24,
            "record_past_end": 3,
            "dtype": "float32",
        },
        "prepare": {"heldout_share": 0.25},
        "extract": {"dtype": "float32"},
        "align": {"draft_vocab_size": 96},
        "train": {
            "dtype": "float32",
            "max_steps": 60,
            "batch_rows": 64,
            "warmup_steps": 5,
            "checkpoint_every": 10,
            "eval_every": 20,
        },
        "evaluate": {"num_draft_tokens": [1, 3], "bootstrap": 200},
        "export": {"dtype": "float32"},
    }


def write_recipe(folder: Path, target: Path | None = None, **changes: Any) -> Path:
    """A recipe file in a folder of its own, with a target beside it unless one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    target = target or save_tiny_target(folder / "target")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe_values(folder, target), **changes}))
    return path


def program(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the installed program as a user does."""
    return subprocess.run(command(*arguments), **_streams(), timeout=timeout, check=False)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The same, in the background, listening to SIGINT: a shell that starts a job in the background
    makes it, and all that it starts, deaf to that signal."""
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command(*arguments), preexec_fn=listen, **_streams())


def command(*arguments: str | Path) -> list[str]:
    return [str(Path(sys.executable).with_name("paceline")), *map(str, arguments)]


def _streams() -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": environment,
    }
