"""`run`: folders and target filled in, stages in order, finished ones skipped, times kept."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import paceline
from paceline.ahead import look_ahead
from paceline.artefact import load_manifest
from paceline.errors import (
    ExportError,
    FingerprintMismatch,
    LayerError,
    TrainingError,
    UsageError,
    VocabularyError,
)
from paceline.recipe import Recipe, build, load_recipe
from paceline.run import StageTimes, plan_stages
from tests.tiny_line import write_recipe

ALL = ["generate", "prepare", "align", "extract", "train", "evaluate", "export", "report"]


def _recipe(**values):
    return build(Recipe, {"target": "t", "run_dir": "r", **values})


def test_each_stage_reads_the_folders_before_it():
    planned = plan_stages(_recipe(prepare={"data": ["a.jsonl"]}))
    assert list(planned) == ALL[1:]
    assert planned["prepare"].data == ["a.jsonl"]
    assert planned["extract"].data == planned["align"].data == planned["evaluate"].data
    assert planned["extract"].data == planned["prepare"].out == "r/prepare"
    assert planned["train"].store == planned["evaluate"].store == "r/extract"
    assert planned["train"].vocab == "r/align"
    assert planned["evaluate"].draft == planned["export"].draft == "r/train"
    assert planned["export"].evaluate == "r/evaluate"
    assert planned["report"].run_dir == "r"
    assert {stage: options.out for stage, options in planned.items()} == {
        stage: f"r/{stage}" for stage in ALL[1:]
    }


def test_the_target_is_named_once():
    planned = plan_stages(
        _recipe(revision="v2", trust_remote_code=True, prepare={"data": ["a"]}, generate=None)
    )
    for stage in ALL[1:-1]:
        options = planned[stage]
        found = (options.target, options.revision, options.trust_remote_code)
        assert found == ("t", "v2", True), stage


def test_what_the_recipe_says_itself_stays():
    planned = plan_stages(
        _recipe(
            prepare={"data": ["a"], "out": "/data/p", "target": "other"},
            extract={"data": "/data/p"},
        )
    )
    assert planned["prepare"].out == "/data/p"
    assert planned["prepare"].target == "other"
    assert planned["prepare"].revision is None
    assert planned["extract"].data == "/data/p"


def test_a_stage_that_writes_elsewhere_is_read_there():
    planned = plan_stages(_recipe(prepare={"data": ["a"]}, extract={"out": "s3://bucket/store"}))
    assert planned["extract"].out == "s3://bucket/store"
    assert planned["train"].store == planned["evaluate"].store == "s3://bucket/store"


def test_generate_comes_first_and_feeds_prepare():
    planned = plan_stages(_recipe(run_dir="odd[1]", generate={"data": ["p.jsonl"]}))
    assert list(planned) == ALL
    assert planned["generate"].out == "odd[1]/generate"
    assert planned["prepare"].data == ["odd[1]/generate"]


def test_two_sources_of_conversations_are_refused():
    with pytest.raises(UsageError, match=r"`generate` and `prepare.data` are both given"):
        plan_stages(_recipe(generate={"data": ["p"]}, prepare={"data": ["c"]}))


def test_a_recipe_without_target_or_file_is_refused():
    with pytest.raises(UsageError, match="no `target`"):
        plan_stages(build(Recipe, {}))
    with pytest.raises(UsageError, match="pass `recipe`"):
        paceline.run()


def test_a_folder_in_the_place_of_a_recipe_is_told_so(tmp_path):
    with pytest.raises(UsageError, match="a folder, not a recipe"):
        paceline.run(str(tmp_path))


def test_the_plan_leaves_the_recipe_alone():
    recipe = _recipe(prepare={"data": ["a"]})
    plan_stages(recipe)
    assert recipe.extract.data == ""
    assert recipe.prepare.out == ""


def test_a_finished_run_does_nothing_and_keeps_its_times(tiny_run):
    times = (tiny_run / "run.json").read_bytes()
    manifests = {s: (tiny_run / s / "manifest.json").read_bytes() for s in ALL}
    again = paceline.run(str(tiny_run.parent / "recipe.yaml"))
    assert {name: stage["skipped"] for name, stage in again["stages"].items()} == dict.fromkeys(
        ALL, True
    )
    assert (tiny_run / "run.json").read_bytes() == times
    assert {s: (tiny_run / s / "manifest.json").read_bytes() for s in ALL} == manifests
    assert Path(again["page"]).is_file()
    assert again["stages"]["evaluate"]["result"]["results"]["3"]["pooled"]["verify_steps"] > 0


def test_times_are_kept_for_every_stage(tiny_run):
    stages = json.loads((tiny_run / "run.json").read_text())["stages"]
    assert list(stages) == ALL
    for name, entry in stages.items():
        assert entry["seconds"] > 0
        assert entry["created"] == load_manifest(tiny_run / name).created


def test_changed_options_are_refused_at_their_stage_and_nothing_is_lost(tiny_run):
    recipe = load_recipe(tiny_run.parent / "recipe.yaml")
    before = {path: path.read_bytes() for path in tiny_run.rglob("*.json")}
    with pytest.raises(FingerprintMismatch, match="draft_vocab_size: was 96, now 64"):
        paceline.run(recipe, overrides=["align.draft_vocab_size=64"])
    assert {path: path.read_bytes() for path in tiny_run.rglob("*.json")} == before


def test_a_changed_stage_and_those_after_it_are_made_anew_where_that_is_asked_for(
    tiny_run, tmp_path, monkeypatch
):
    """As `run` itself advises; also by a command that is stopped, and given once too often."""
    shutil.copytree(tiny_run, tmp_path / "run")
    recipe = str(tiny_run.parent / "recipe.yaml")
    changes = [f"run_dir={tmp_path / 'run'}", "train.max_steps=12"]
    with pytest.raises(FingerprintMismatch, match=r"max_steps: was 60, now 12") as refused:
        paceline.run(recipe, changes)
    assert "--overwrite-from train" in str(refused.value)
    assert "(--overwrite)" not in str(refused.value)

    def stop(_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(paceline.evaluate, "VERB", (None, stop))
        with pytest.raises(KeyboardInterrupt):
            paceline.run(recipe, changes, overwrite_from="train")
    done = paceline.run(recipe, changes, overwrite_from="train")["stages"]
    anew = ["evaluate", "export", "report"]
    assert [name for name, stage in done.items() if not stage["skipped"]] == anew
    assert done["train"]["result"]["steps"] == 12
    for again in ({"overrides": changes, "overwrite_from": "generate"}, {"overrides": changes}):
        stages = paceline.run(recipe, **again)["stages"].values()
        assert all(stage["skipped"] for stage in stages)
    always = [*changes, "train.overwrite=true", "report.overwrite=true"]
    assert all(stage["skipped"] for stage in paceline.run(recipe, always)["stages"].values())


def test_starting_over_from_a_stage_that_is_not_there_is_refused(tmp_path):
    recipe = _recipe(run_dir=str(tmp_path / "run"), prepare={"data": ["a"]})
    with pytest.raises(UsageError, match="the recipe has no `generate`; its stages are prepare,"):
        paceline.run(recipe, overwrite_from="generate")
    assert not (tmp_path / "run").exists()


def test_a_failing_stage_keeps_those_before_it_and_the_time(tmp_path):
    recipe = write_recipe(tmp_path)
    with pytest.raises(UsageError, match="cuda:7"):
        paceline.run(str(recipe), ["extract.device=cuda:7"])
    assert load_manifest(tmp_path / "run" / "prepare").status == "complete"
    stages = json.loads((tmp_path / "run" / "run.json").read_text())["stages"]
    assert stages["prepare"]["seconds"] > 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (["extract.layers=[1, 99, 3]"], LayerError, "99"),
        (
            ["train.draft.num_attention_heads=5"],
            TrainingError,
            "32 is not a multiple of num_attention_heads 5",
        ),
        (
            ["train.draft.hidden_size=64", "train.train_head=false"],
            TrainingError,
            "train_head false keeps the target's head of width 32",
        ),
        (
            ["align.draft_vocab_size=32000"],
            VocabularyError,
            "^align.draft_vocab_size 32000 is above the target's logit width 260",
        ),
        (["train.trackers=[wandb]"], UsageError, "wandb is not installed"),
        (["train.device=gpu"], UsageError, "device 'gpu': name auto, cpu, cuda or cuda:N"),
        (["evaluate.device=gpu"], UsageError, "device 'gpu'"),
        (["train.start_from=./nowhere"], UsageError, "nowhere holds no draft"),
        (["train.start_from={run}/train"], UsageError, "choose another `out`"),
        (
            ["train.start_from={tiny}/train", "extract.layers=[1, 4, 6]"],
            FingerprintMismatch,
            r"reads the layers \[2, 4, 5\], the states are those of \[1, 4, 6\]",
        ),
        (["evaluate.beside=./nowhere"], UsageError, "nowhere holds no draft"),
        (
            ["evaluate.mode=decode", "evaluate.prompts=[nowhere.jsonl]"],
            UsageError,
            "nowhere.jsonl",
        ),
        (["evaluate.mode=served"], UsageError, "evaluate: vLLM is not installed"),
        (["export.server_version={vllm: 0.20.0}"], ExportError, "vLLM 0.20.0 cannot carry"),
        (
            ["export.server=[sglang]", "extract.layers=[1, 4, 6]"],
            ExportError,
            "SGLang carries no draft with layer_list",
        ),
    ],
)
def test_what_a_late_stage_would_refuse_stops_the_run_before_its_first(
    tiny_run, tmp_path, monkeypatch, changes, error, words
):
    for package in ("vllm", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    recipe = write_recipe(tmp_path, tiny_run.parent / "target")
    own = tmp_path / "run" / "train"
    own.mkdir(parents=True)
    changes = [
        c.replace("{tiny}", str(tiny_run)).replace("{run}", str(own.parent)) for c in changes
    ]
    with pytest.raises(error, match=words):
        paceline.run(str(recipe), changes)
    assert list(own.parent.rglob("*")) == [own]


def test_a_run_that_has_begun_looks_ahead_too(tiny_run, tmp_path):
    run = tmp_path / "run"
    for stage in ("generate", "prepare"):
        shutil.copytree(tiny_run / stage, run / stage)
    recipe = str(tiny_run.parent / "recipe.yaml")
    with pytest.raises(TrainingError, match="num_attention_heads 5"):
        paceline.run(recipe, [f"run_dir={run}", "train.draft.num_attention_heads=5"])
    assert not (run / "extract").exists()


def test_a_training_of_its_own_store_is_not_held_against_the_recipes_layers(tmp_path):
    recipe = load_recipe(
        write_recipe(tmp_path), ["train.store=elsewhere", "extract.layers=[1, 99, 3]"]
    )
    look_ahead(recipe, plan_stages(recipe), {"train"})


def _manifest(folder, created, status="running", finished=None):
    folder.mkdir(exist_ok=True)
    values = {
        "stage": "train",
        "schema": 1,
        "status": status,
        "inputs": {},
        "options": {},
        "versions": {},
        "created": created,
        "finished": finished,
    }
    (folder / "manifest.json").write_text(json.dumps(values))


def test_times_add_up_over_interruptions_and_start_anew_with_a_new_folder(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("paceline.run.time.monotonic", lambda: now[0])
    folder, path = tmp_path / "train", tmp_path / "run.json"

    def work(seconds, created, status, finished=None, error=None):
        with StageTimes(path).measure("train", str(folder)) as measured:
            now[0] += seconds
            _manifest(folder, created, status, finished)
            if error:
                raise error
        return measured

    with pytest.raises(KeyboardInterrupt):
        work(5, "monday", "running", error=KeyboardInterrupt())
    assert _seconds(path) == 5
    work(7, "monday", "complete", "later")
    assert _seconds(path) == 12
    assert work(1, "monday", "complete", "later").skipped
    assert _seconds(path) == 12
    assert str(work(3, "tuesday", "complete", "then")) == "3.0 s"
    assert _seconds(path) == 3


def _seconds(path):
    return json.loads(path.read_text())["stages"]["train"]["seconds"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
@pytest.mark.parametrize("name", ["run.json", "plan.json"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, tiny_run, name, text):
    """By what goes on with the run, and by what makes its page."""
    folder = tmp_path / "run"
    (folder / "prepare").mkdir(parents=True)
    shutil.copy(tiny_run / "prepare" / "manifest.json", folder / "prepare")
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=rf"{name} is damaged .*: remove it"):
        paceline.run(str(tiny_run.parent / "recipe.yaml"), [f"run_dir={folder}"])
    with pytest.raises(UsageError, match=rf"{name} is damaged .*: remove it"):
        paceline.report(run_dir=str(folder))
