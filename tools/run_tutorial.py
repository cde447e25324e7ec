"""Runs the tutorial as it stands and writes what its commands print into its page.

    python tools/run_tutorial.py

Every line `$ COMMAND` in a block ```console of docs/tutorial.md is run in order, in a fresh folder
that sees the repository's recipes; a block ```yaml after a line that ends in "`NAME.yaml`:" is
written there first. What stood under a command is replaced by what it printed now: its results, and
where it failed, its error.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"(^```(\w+)\n)(.*?)(^```$)", re.M | re.S)
_FILE = re.compile(r"`(\w+\.yaml)`:\n\n\Z")


def main() -> None:
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory(prefix="tutorial-") as name:
        folder = Path(name)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        pieces, end = [], 0
        for block in _BLOCK.finditer(text):
            pieces.append(text[end : block.start(3)])
            pieces.append(_filled(block, text, folder))
            end = block.end(3)
        PAGE.write_text("".join(pieces) + text[end:])


def _filled(block: re.Match[str], text: str, folder: Path) -> str:
    kind, inside = block[2], block[3]
    if kind == "yaml" and (told := _FILE.search(text[: block.start()])):
        (folder / told[1]).write_text(inside)
    if kind != "console":
        return inside
    return "".join(f"{command}{_run(command, folder)}" for command in _commands(inside))


def _commands(inside: str) -> Iterator[str]:
    """`$ COMMAND` lines with their continuations, without what stands under them."""
    yield from re.findall(r"^\$ (?:.*\\\n)*.*\n", inside, flags=re.M)


def _run(command: str, folder: Path) -> str:
    line = command.removeprefix("$ ").replace("\\\n", " ").strip()
    print(line, file=sys.stderr, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout
    if done.returncode and (at := done.stderr.rfind("ERROR")) >= 0:
        output += done.stderr[at:]
    for place, shown in ((str(folder), "~/paceline"), (str(Path.home()), "~")):
        output = output.replace(place, shown)
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
