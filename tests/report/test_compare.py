"""Runs side by side: the numbers are those of the runs, the differences those of a plain loop."""

import html
import json
import random
import re
import shutil
import tracemalloc
from pathlib import Path

import pytest

import paceline
from paceline.errors import FingerprintMismatch, UsageError
from paceline.report.compare import paired_difference
from paceline.report.failures import shown
from tests.lines import TINY_LAYERS, extracted, prepared, trained


@pytest.fixture
def page(compare_page) -> Path:
    return compare_page


def _text(page):
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", " ", page.read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_both_drafts_stand_there_with_their_own_figures(page, tiny_run, other_run):
    text = _text(page)
    for run in (tiny_run, other_run):
        result = json.loads((run / "evaluate" / "result.json").read_text())
        for k in ("1", "3"):
            pooled = result["results"][k]["pooled"]
            low, high = pooled["interval"]
            assert f"{pooled['acceptance_length']:.2f} {low:.2f}\u2013{high:.2f}" in text
    assert result["definition"] in text


def test_what_was_done_otherwise_is_listed_and_nothing_else(page):
    text = _text(page)
    section = text[text.index("What differs option") : text.index("Training Loss")]
    assert "train.max_steps 60 15" in section
    assert "train.learning_rate 0.002 0.001" in section
    assert "optimiser steps 60 15" in section
    assert "train.seed" not in section
    assert "align." not in section


def test_the_difference_is_the_runs_own(page, tiny_run, other_run):
    def counts(run):
        rows = map(json.loads, (run / "evaluate" / "conversations.jsonl").read_text().splitlines())
        return [r for r in rows if r["num_draft_tokens"] == 3]

    def length(rows):
        return 1 + sum(r["accepted"] for r in rows) / sum(r["verify_steps"] for r in rows)

    change = length(counts(other_run)) - length(counts(tiny_run))
    assert f"{change:+.3f}" in _text(page)


def test_the_page_needs_nothing_but_itself(page):
    text = page.read_text()
    assert not re.search(r"https?://|<script|@import|url\(", text)
    titles = re.findall(r"<figcaption>([^<]+)", text)
    assert titles == ["Acceptance length", "Acceptance per position, K = 3", "Loss"]


def test_paired_differences_are_those_of_a_loop():
    generator = random.Random(0)
    ours = {f"c{i}": (generator.randint(5, 20), generator.randint(0, 30)) for i in range(60)}
    theirs = {
        c: (steps, accepted + generator.randint(0, 3)) for c, (steps, accepted) in ours.items()
    }
    theirs |= {"only theirs": (10, 500)}
    ours |= {"only ours": (10, 500)}
    change, low, high = paired_difference(ours, theirs)
    shared = [c for c in ours if c in theirs]
    rate = lambda counts, chosen: (
        sum(counts[c][1] for c in chosen) / sum(counts[c][0] for c in chosen)
    )
    assert change == pytest.approx(rate(theirs, shared) - rate(ours, shared))
    draws = []
    for _ in range(4000):
        chosen = [generator.choice(shared) for _ in shared]
        draws.append(rate(theirs, chosen) - rate(ours, chosen))
    draws.sort()
    width = draws[-100] - draws[100]
    assert low == pytest.approx(draws[100], abs=0.15 * width)
    assert high == pytest.approx(draws[-100], abs=0.15 * width)


def test_equal_runs_differ_by_nothing_and_strangers_not_at_all():
    ours = {f"c{i}": (10, i) for i in range(9)}
    assert paired_difference(ours, dict(ours)) == (0.0, 0.0, 0.0)
    assert paired_difference(ours, {"x": (3, 3)}) is None
    assert paired_difference({"a": (0, 0)}, {"a": (4, 2)}) is None


def test_paired_differences_of_many_conversations_take_little_memory():
    ours = {str(i): (10, i % 7) for i in range(4000)}
    theirs = {name: (10, accepted + 1) for name, (_, accepted) in ours.items()}
    tracemalloc.start()
    try:
        change, low, high = paired_difference(ours, theirs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (change, low, high) == pytest.approx((0.1, 0.1, 0.1))
    # All resamples at once took 80 kB for each conversation.
    assert peak < 40e6


def test_one_shared_conversation_gives_no_paired_difference():
    ours, theirs = {"a": (4, 1), "b": (3, 3)}, {"a": (4, 2), "c": (3, 3)}
    assert paired_difference(ours, theirs) is None
    assert paired_difference(ours, {**theirs, "b": (3, 2)}) is not None


def test_equal_ids_of_other_data_are_not_paired(tmp_path):
    """Two data sets whose conversations are called r0, r1, ... alike."""
    extracted(tmp_path / "one")
    trained(tmp_path / "one", max_steps=2)
    two = str(prepared(tmp_path / "two", seed=1))
    out = str(tmp_path / "two" / "store")
    paceline.extract(data=two, out=out, layers=TINY_LAYERS, dtype="float32")
    runs = []
    for name, store in (("one", "one"), ("again", "one"), ("two", "two")):
        paceline.evaluate(
            draft=str(tmp_path / "one" / "draft"),
            store=str(tmp_path / store / "store"),
            out=str(tmp_path / name / "evaluate"),
            dtype="float32",
            num_draft_tokens=[3],
        )
        runs.append(str(tmp_path / name))
    same, other = (
        _text(Path(paceline.report(compare=True, runs=pair, out=str(tmp_path / out))["page"]))
        for pair, out in (([runs[0], runs[1]], "same"), ([runs[0], runs[2]], "other"))
    )
    assert "Differences to one" in same and "+0.000" in same
    assert "no paired difference" not in same
    assert "two was not measured on the conversations of one" in other
    assert "Differences to" not in other


@pytest.mark.parametrize("alone", [False, True])
def test_conversations_that_only_one_run_has_are_told(tiny_run, other_run, tmp_path, alone):
    fewer = tmp_path / "fewer"
    shutil.copytree(other_run, fewer, ignore=shutil.ignore_patterns("report"))
    path = fewer / "evaluate" / "conversations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = sorted({row["conversation"] for row in rows})
    kept = [row for row in rows if (row["conversation"] == names[0]) is alone]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    runs = [str(tiny_run), str(fewer)]
    page = paceline.report(compare=True, runs=runs, out=str(tmp_path / "page"))["page"]
    told = f"share {len(names) - 1} conversations of {len(names) - 1} and {len(names)}"
    if alone:
        told = "fewer and run share one conversation, too few for a paired difference"
    assert told in _text(Path(page))
    assert ("Differences to" in _text(Path(page))) is not alone


def test_what_cannot_be_compared_is_refused(tiny_run, other_run, tmp_path):
    both = [str(tiny_run), str(other_run)]
    with pytest.raises(UsageError, match="takes two runs or more"):
        paceline.report(compare=True, runs=both[:1])
    with pytest.raises(UsageError, match="side by side with `--compare"):
        paceline.report(runs=both)
    with pytest.raises(UsageError, match="the same run is given twice"):
        paceline.report(compare=True, runs=[both[0], both[0]])
    shutil.copytree(tiny_run / "align", tmp_path / "half" / "align")
    with pytest.raises(UsageError, match="no finished `evaluate`"):
        paceline.report(compare=True, runs=[both[0], str(tmp_path / "half")])
    shutil.copytree(other_run / "evaluate", tmp_path / "alien" / "evaluate")
    path = tmp_path / "alien" / "evaluate" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"]["target"]["fingerprint"]["weights"] = "another"
    path.write_text(json.dumps({**manifest, "checksum": None}))
    with pytest.raises(FingerprintMismatch, match=r"different targets[\s\S]*weights"):
        paceline.report(compare=True, runs=[both[0], str(tmp_path / "alien")])


def test_runs_of_one_name_are_told_apart_by_their_folders(tiny_run, other_run, tmp_path):
    shutil.copytree(other_run, tmp_path / "again" / "run", ignore=shutil.ignore_patterns("report"))
    out = tmp_path / "page"
    runs = [str(tiny_run), str(tmp_path / "again" / "run")]
    paceline.report(compare=True, runs=runs, out=str(out))
    assert "again/run" in _text(out / "index.html")


@pytest.mark.parametrize(
    ("text", "says"), [(" the", "\u2423the"), ("\n", "\u21b5"), ("", "id 7"), (None, "id 7")]
)
def test_tokens_of_whitespace_can_be_seen(text, says):
    assert shown(text, 7) == says
