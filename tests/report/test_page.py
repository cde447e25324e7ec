"""The page says what the stages' folders say, and needs nothing but itself."""

import html
import json
import re
import shutil

import pytest

import paceline
from paceline.errors import UsageError
from paceline.report.gather import gather
from paceline.report.run import render

STAGES = ("generate", "prepare", "extract", "align", "train", "evaluate", "export")


@pytest.fixture(scope="module")
def page(tiny_run):
    return (tiny_run / "report" / "index.html").read_text()


def _copy(tiny_run, folder, *stages):
    for stage in stages:
        shutil.copytree(tiny_run / stage, folder / stage)
    return folder


def _edit(folder, stage, change):
    path = folder / stage / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps({**manifest, "checksum": None}))


def _text(page):
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_page_is_one_file_that_asks_for_nothing(page):
    assert not re.search(r"https?://", page)
    assert not re.search(r"<(script|iframe|object|embed|img|base|form)\b", page)
    assert not re.search(r"@import|url\(", page)
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', page) == ["data:,"]


def test_acceptance_is_what_evaluate_measured(page, tiny_run):
    result = json.loads((tiny_run / "evaluate" / "result.json").read_text())
    text = _text(page)
    tables = {"draft": result["results"], **result["baselines"]}
    for found in tables.values():
        for k in ("1", "3"):
            pooled = found[k]["pooled"]
            low, high = pooled["interval"]
            assert f"{pooled['acceptance_length']:.2f} {low:.2f}\u2013{high:.2f}" in text
    assert result["definition"] in text
    assert "bigram table" in text
    assert "prompt lookup" in text
    for source in ("colours", "things"):
        assert source in text


def test_speed_and_the_best_draft_are_told(page, tiny_run):
    text, result = _text(page), json.loads((tiny_run / "train" / "manifest.json").read_text())
    best = result["result"]["best"]
    told = f"{best['acceptance_length']:.2f} at K = {best['num_draft_tokens']}"
    assert f"best held-out acceptance length {told}, after step {best['step']}" in text
    assert re.search(r"needed arithmetic \(MFU\) \d+\.\d% of matrix products alone", text)
    assert re.search(r"waiting for data \d+\.\d% of the time", text) and "peak memory" in text


def test_every_figure_is_there(page):
    titles = re.findall(r"<figcaption>([^<]+)", page)
    assert titles == [
        "Acceptance length",
        "Acceptance per position, K = 3",
        "Acceptance length by source, K = 3",
        "Loss",
        "Agreement with the target",
        "Held-out acceptance length, K = 5",
        "Gradient norm",
        "Coverage of the supervised tokens",
        "Time per stage",
    ]
    assert page.count('<svg class="figure"') == len(titles)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S).lower().split()


def test_where_drafts_fail_is_what_evaluate_counted(page, tiny_run):
    told = json.loads((tiny_run / "evaluate" / "result.json").read_text())["failures"]
    text = _text(page)
    section = text[text.index("Where drafts fail At") :]
    assert f"At {told['points']:,} places" in section
    assert f"{told['right']:,} times ({100 * told['right'] / told['points']:.1f}%)" in section
    assert told["tokens"]
    for entry in told["tokens"][:12]:
        share = f"{100 * entry['right'] / entry['tries']:.0f}% {entry['tries']:,}"
        assert share in section


def test_a_token_that_the_draft_cannot_say_is_told_beside_it(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")

    def lost(manifest):
        manifest["result"]["failures"]["tokens"][0] |= {"text": "word", "reachable": False}

    _edit(folder, "evaluate", lost)
    assert "word<small>outside the draft vocabulary</small></th>" in render(gather(folder))


def test_a_run_whose_failures_were_not_counted_has_no_such_section(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")
    _edit(folder, "evaluate", lambda manifest: manifest["result"].pop("failures"))
    assert "Where drafts fail" not in render(gather(folder))


def test_passages_are_told_with_their_misses_marked(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")
    pieces = [
        {"id": 1, "text": " <b>", "right": True},
        {"id": 2, "text": " missed\n", "right": False},
        {"id": 3, "text": None, "right": False},
    ]
    passage = {"sample_id": "s1", "source": "x", "share": 1 / 3, "before": "so", "pieces": pieces}
    _edit(folder, "evaluate", lambda m: m["result"]["failures"].update(passages=[passage]))
    page = render(gather(folder))
    assert "33% right, sample s1, source x" in page
    assert '<span class="before">so</span> &lt;b&gt;<mark> missed\n</mark><mark>[3] </mark>' in page


def test_the_plan_stands_beside_what_came(page, tiny_run):
    plan = json.loads((tiny_run / "plan.json").read_text())
    seconds = json.loads((tiny_run / "run.json").read_text())["stages"]
    text = _text(page)
    section = text[text.index("Plan and actual What came") : text.index("Options that shaped")]
    assert plan["data"]["origin"] in section
    found = sum(p.stat().st_size for p in (tiny_run / "train").rglob("*") if p.is_file())
    planned = plan["stages"]["train"]["bytes"]
    assert f"{100 * found / planned:.0f}%" in section
    # A share of a time that reads 0.0 s is not told.
    assert seconds["extract"]["seconds"] and "of 0.0 s, " not in section


def test_a_run_without_a_plan_has_no_such_section(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")
    assert "Plan and actual" not in render(gather(folder))


def test_provenance_names_every_stage_and_what_came_from_outside(page, tiny_run):
    text = _text(page)
    for stage in STAGES:
        manifest = json.loads((tiny_run / stage / "manifest.json").read_text())
        assert manifest["fingerprint"] in text
    prepared = json.loads((tiny_run / "prepare" / "manifest.json").read_text())
    assert str(tiny_run.parent / "target") in text
    assert prepared["inputs"]["target"]["fingerprint"]["config"] in text
    assert prepared["versions"]["torch"] in text
    assert '"draft_vocab_size": 96' in text


def test_verification_tells_the_probe_and_the_replay(page, tiny_run):
    text = _text(page)
    probe = json.loads((tiny_run / "extract" / "manifest.json").read_text())["result"]["probe"]
    assert f"{probe['num_greedy_agree']} of {probe['num_greedy_rows']}" in text
    for layer in probe["errors"]:
        assert layer in text
    assert "32 in = 32 stored + 0 quarantined + 0 skipped" in text
    assert "exported form vllm, re-loaded, replays the trained draft" in text
    assert "look" not in re.findall(r'class="mark">(\w+)<', page)


def test_a_lost_sample_and_a_waived_comparison_are_not_passed(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "extract")

    def worse(manifest):
        manifest["result"]["accounting"] |= {"done": 31, "quarantined": {"zero row": 1}}
        manifest["result"]["probe"]["errors"] = None

    _edit(folder, "extract", worse)
    page = render(gather(folder))
    assert re.findall(r'class="mark">(\w+)<', page) == ["look", "note", "passed", "look"]
    assert "31 stored + 1 quarantined" in page
    assert "waived" in page


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_a_run_is_a_page_too(tiny_run, tmp_path, stage):
    folder = _copy(tiny_run, tmp_path / "part", stage)
    result = paceline.report(run_dir=str(folder), out=str(tmp_path / "page"))
    assert "Provenance" in (tmp_path / "page" / "index.html").read_text()
    assert result["page"] == str(tmp_path / "page" / "index.html")


def test_measurements_that_found_nothing_are_told_as_such(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")

    def nothing(manifest):
        for table in (manifest["result"]["results"], manifest["result"]["baselines"]["bigram"]):
            for found in table.values():
                for pooled in (found["pooled"], *found["sources"].values()):
                    pooled |= {"acceptance_length": None, "interval": None}
                    pooled["per_position_intervals"] = [None] * len(pooled["per_position"])

    _edit(folder, "evaluate", nothing)
    assert "n/a" in render(gather(folder))


def test_one_conversation_has_figures_without_intervals(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "evaluate")

    def alone(manifest):
        for table in (manifest["result"]["results"], *manifest["result"]["baselines"].values()):
            for found in table.values():
                for pooled in (found["pooled"], *found["sources"].values()):
                    unknown = [None] * len(pooled["per_position"])
                    pooled |= {"interval": None, "per_position_intervals": unknown}

    _edit(folder, "evaluate", alone)
    page = render(gather(folder))
    assert "one conversation gives no interval" in _text(page)
    assert page.count('<svg class="figure"') == 3


def test_a_draft_trained_for_one_step_and_without_held_out_data(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, "train")
    log = folder / "train" / "log.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    page = render(gather(folder))
    assert page.count('<svg class="figure"') == 3


def test_names_from_outside_are_only_text(tiny_run, tmp_path):
    folder = _copy(tiny_run, tmp_path, *STAGES)
    hostile = "<img src=x onerror=alert(1)>"

    def rename(manifest):
        for found in manifest["result"]["results"].values():
            found["sources"][hostile] = found["sources"].pop("things")
        for method in manifest["result"]["baselines"].values():
            for found in method.values():
                found["sources"][hostile] = found["sources"].pop("things")

    _edit(folder, "evaluate", rename)
    page = render(gather(folder), title=hostile)
    assert "<img" not in page
    assert hostile in _text(page)


def test_the_title_is_the_target_s_or_one_s_own(tiny_run, tmp_path):
    record = gather(tiny_run)
    assert "<title>EAGLE-3 draft for target</title>" in render(record)
    assert "<title>Mine</title>" in render(record, "Mine")


def test_a_page_of_the_same_run_is_not_made_twice(tiny_run):
    page = tiny_run / "report" / "index.html"
    before = page.stat().st_mtime_ns
    paceline.report(run_dir=str(tiny_run))
    assert page.stat().st_mtime_ns == before


def test_what_is_no_run_is_refused(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="pass `run_dir`"):
        paceline.report()
    with pytest.raises(UsageError, match="no such folder"):
        paceline.report(run_dir=str(tmp_path / "none"))
    with pytest.raises(UsageError, match="holds no finished stage"):
        paceline.report(run_dir=str(tmp_path))
    shutil.copytree(tiny_run / "align", tmp_path / "align-1")
    shutil.copytree(tiny_run / "align", tmp_path / "align-2")
    with pytest.raises(UsageError, match="folders of `align`, align-1, align-2, and none is"):
        paceline.report(run_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["another", "served"])
def test_a_second_folder_of_a_stage_changes_no_page(tiny_run, tmp_path, caplog, name):
    """Before `evaluate` or after it in the order of names."""
    folder = _copy(tiny_run, tmp_path / "run", "evaluate", "align")
    page = render(gather(folder))
    shutil.copytree(folder / "evaluate", folder / name)
    _edit(folder, name, lambda manifest: manifest["result"].update(mode="decode"))
    with caplog.at_level("INFO", logger="paceline"):
        assert render(gather(folder)) == page
    assert f"leaves out {name}" in caplog.text
