"""The commands of pages that work on a run's folder, run as they stand there on a tiny run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from paceline.cli.main import _parse

DOCS = Path(__file__).parents[1] / "docs"
# Placeholders, another tool's draft, and what takes a real vLLM (tests/engines/serving has that).
NOT_RUN = ("...", "--help", "their-draft", "--mode served")


def _commands(page: str) -> list[str]:
    text = (DOCS / page).read_text().replace("\\\n", " ")
    return re.findall(r"^    (paceline [a-zA-Z].*)$", text, flags=re.M)


# What the page makes itself is not there yet.
@pytest.mark.parametrize(
    ("page", "run", "made_here"),
    [
        ("low-acceptance.md", "runs/x", ()),
        ("evaluate.md", "runs/x", ("evaluate",)),
        ("export.md", "runs/my", ("export",)),
    ],
)
def test_commands_work_on_a_run_s_folder(tiny_run, tmp_path, monkeypatch, page, run, made_here):
    monkeypatch.chdir(tmp_path)
    for folder in (run, "runs/y"):
        shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns(*made_here))
    target = str(tiny_run.parent / "target")
    Path("mt_bench").mkdir()
    question = {"question_id": 1, "turns": ["red sky", "blue bird"]}
    Path("mt_bench/question.jsonl").write_text(json.dumps(question) + "\n")
    done = 0
    for line in _commands(page):
        if not any(words in line for words in NOT_RUN):
            words = [{"TARGET": target, "my-target": target}.get(w, w) for w in shlex.split(line)]
            request, _, message = _parse(words[1:])
            assert request is not None, f"{line}: {message}"
            request.run()
            done += 1
    assert done >= 4
    # What they left beside the run's own stages is in no page's way.
    request, _, _ = _parse(["report", "--run-dir", run, "--out", "page"])
    assert Path(request.run()["page"]).is_file()
