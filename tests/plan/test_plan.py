"""Plans against what came: folders really written are the oracle for bytes, files and counts."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.dataset import TokenDataset
from paceline.errors import DataError, TargetError, UsageError
from paceline.recipe import load_recipe
from paceline.runlog import read_log
from paceline.stages import plan_stages
from paceline.store import Store
from tests.lines import TINY_LAYERS, extracted, trained, write_rows
from tests.plan.configs import KIMI_K25, QWEN3_8B, write_config
from tests.targets import save_target
from tests.tiny_line import program

RECIPES = Path(__file__).parents[2] / "recipes"
H100_FLOPS = 6e14


def _recipe(folder, **groups):
    values = {
        "target": str(folder / "target"),
        "run_dir": str(folder / "run"),
        "prepare": {"data": [str(folder / "rows.jsonl")], "heldout_share": 0.2},
        "extract": {"layers": TINY_LAYERS, "dtype": "float32"},
        "align": {"draft_vocab_size": 64},
        "train": {"dtype": "float32", "max_steps": 12, "batch_rows": 60},
        **groups,
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(values))  # JSON is YAML
    return str(path)


def _bytes_in(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("codec", "layers"), [("raw", TINY_LAYERS), ("int8", [2, 5]), ("fp8", [1, 3, 4, 7])]
)
def test_the_store_is_as_large_as_planned(tmp_path, codec, layers):
    options = {"layers": layers, "codec": codec, "shard_bytes": 60_000}
    store = extracted(tmp_path, **options)
    extract = {**options, "dtype": "float32"}
    plan = paceline.plan(_recipe(tmp_path, extract=extract), flops=1e12)
    planned = plan["stages"]["extract"]
    shards = list(store.glob("shards/*.safetensors"))
    found = sum(p.stat().st_size for p in shards) + (store / "index.safetensors").stat().st_size
    # What is planned for manifests and logs is no part of the arithmetic looked at here; a shard
    # more or less has its header.
    assert planned["bytes"] - (8 << 10) == pytest.approx(found, rel=0.02, abs=8_500)
    assert planned["files"] - 6 == pytest.approx(len(shards), abs=1)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_checkpoints_are_as_large_as_planned(tmp_path, optimiser):
    extracted(tmp_path)
    options = {"optimiser": optimiser, "checkpoint_every": 3}
    trained(tmp_path, **options)  # 8 steps: checkpoints at 3, 6 and 8
    train = {"dtype": "float32", "max_steps": 8, "batch_rows": 60, **options}
    planned = paceline.plan(_recipe(tmp_path, train=train), flops=1e12)["stages"]["train"]
    checkpoints = sorted((tmp_path / "draft" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    one = _bytes_in(checkpoints[0])
    # A checkpoint also holds the generator's state and the names of its tensors: 10 kB.
    assert planned["peak_bytes"] - planned["bytes"] == pytest.approx(one - 10_000, rel=0.02)
    whole = _bytes_in(tmp_path / "draft") - 2 * 10_000
    assert planned["bytes"] == pytest.approx(whole, rel=0.02, abs=12_000)


def test_a_draft_that_is_trained_further_is_as_large_as_it_was(tmp_path):
    """Whatever the options of new drafts say."""
    extracted(tmp_path)
    paceline.align(
        data=str(tmp_path / "prepare"), out=str(tmp_path / "large"), draft_vocab_size=160
    )
    draft = {"num_layers": 2, "intermediate_size": 96}
    trained(tmp_path, "earlier", vocab=str(tmp_path / "large"), draft=draft)
    options = {"start_from": str(tmp_path / "earlier"), "checkpoint_every": 3}
    trained(tmp_path, "later", vocab="", **options)
    train = {"dtype": "float32", "max_steps": 8, "batch_rows": 60, **options}
    planned = paceline.plan(_recipe(tmp_path, train=train), flops=1e12)["stages"]["train"]
    whole = _bytes_in(tmp_path / "later") - 2 * 10_000
    assert planned["bytes"] == pytest.approx(whole, rel=0.02, abs=12_000)


def test_a_stream_needs_the_room_of_its_budget(tmp_path):
    save_target(tmp_path / "target")
    write_rows(tmp_path / "rows.jsonl", 30)
    extract = {"layers": TINY_LAYERS, "dtype": "float32"}
    whole = paceline.plan(_recipe(tmp_path, extract=extract), flops=1e12)
    narrow = {**extract, "stream_bytes": 40_000, "shard_bytes": 5_000}
    stream = paceline.plan(_recipe(tmp_path, extract=narrow), flops=1e12)
    saved = whole["stages"]["extract"]["bytes"] - stream["stages"]["extract"]["bytes"]
    assert saved > 0
    assert stream["stages"]["extract"]["bytes"] - (8 << 10) == 40_000
    assert whole["total"]["bytes"] - stream["total"]["bytes"] == saved


def test_a_whole_run_is_as_large_as_planned(tiny_run):
    """Every folder of a finished run, the answers taken as data."""
    recipe = load_recipe(
        tiny_run.parent / "recipe.yaml",
        ["generate=null", f"prepare.data=[{tiny_run / 'generate'}]"],
    )
    plan = paceline.plan(recipe, out=str(tiny_run.parent / "plan.json"), flops=1e12)
    data = TokenDataset(tiny_run / "prepare").manifest.result
    assert plan["data"]["tokens"] == data["tokens"]
    assert plan["data"]["supervised_tokens"] == data["supervised_tokens"]
    assert plan["data"]["heldout_supervised_tokens"] == data["splits"]["heldout"]["supervised"]
    stages = plan["stages"]
    small = 24 << 10
    for stage in ("prepare", "extract", "align", "train", "export"):
        found = _bytes_in(tiny_run / stage)
        assert stages[stage]["bytes"] == pytest.approx(found, rel=0.1, abs=small), stage
    assert set(stages) == {p.name for p in tiny_run.iterdir() if p.is_dir()} - {"generate"}


def test_a_sample_stands_for_all_rows(tmp_path):
    """Lengths that differ a lot: the plan of 300 rows of 3,000 is near the truth of all."""
    save_target(tmp_path / "target")
    generator = np.random.default_rng(1)
    lengths = np.clip(generator.lognormal(3.6, 0.7, 3000), 6, 400).astype(int)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i, length in enumerate(lengths.tolist()):
            ids = generator.integers(4, 260, length).tolist()
            cut = length // 3
            row = {"id": f"r{i}", "prompt_ids": ids[:cut], "response_ids": ids[cut:]}
            file.write(json.dumps(row) + "\n")
    plan = paceline.plan(_recipe(tmp_path), sample_rows=300, flops=1e12)
    assert plan["data"]["rows"] == 3000
    assert plan["data"]["tokens"] == pytest.approx(lengths.sum(), rel=0.1)
    assert plan["data"]["supervised_tokens"] == pytest.approx((lengths - lengths // 3).sum(), 0.1)
    assert "300 of 3,000 rows" in plan["data"]["origin"]
    closer = paceline.plan(_recipe(tmp_path), sample_rows=5000, flops=1e12)
    assert closer["data"]["tokens"] == lengths.sum()


def test_a_training_has_the_planned_steps_where_answers_are_longer_than_a_step(tmp_path):
    extracted(tmp_path)
    recipe = _recipe(tmp_path, train={"dtype": "float32", "batch_rows": 7})
    planned = paceline.plan(recipe, flops=1e12)["stages"]["train"]["how"]["seconds"]
    made = trained(tmp_path, max_steps=None, epochs=1.0, batch_rows=7)["steps"]
    assert planned.startswith(f"{made} steps ")
    supervised = Store(tmp_path / "store").expected_rows("train")
    assert made < 0.8 * supervised / 7


@pytest.mark.parametrize(
    "options",
    [{}, {"draft": {"num_layers": 2}, "train_head": False}, {"loss": "hybrid", "batch_rows": 7}],
    ids=str,
)
def test_a_training_needs_the_planned_arithmetic(tmp_path, options):
    extracted(tmp_path)
    train = {"dtype": "float32", "batch_rows": 60, **options}
    plan = paceline.plan(_recipe(tmp_path, train=train), flops=1e9)
    # Unmeasured, half of the rate is taken to be reached.
    planned = plan["stages"]["train"]["seconds"] * 1e9 / 2
    trained(tmp_path, max_steps=None, epochs=1.0, **options)
    logged = sum(r["needed_flops"] for r in read_log(tmp_path / "draft").train)
    assert planned == pytest.approx(logged, rel=1e-6)


def test_measured_rates_are_of_the_real_stages_and_tell_what_lossless_saves(tmp_path):
    store = extracted(tmp_path, codec="lossless")
    extract = {"layers": TINY_LAYERS, "codec": "lossless", "dtype": "float32"}
    recipe = _recipe(tmp_path, extract=extract)
    bound = paceline.plan(recipe, flops=1e12)
    plan = paceline.plan(recipe, measure=True, measure_tokens=2000, measure_steps=8)
    shards = sum(p.stat().st_size for p in store.glob("shards/*.safetensors"))
    assert plan["stages"]["extract"]["bytes"] == pytest.approx(shards, rel=0.1)
    assert plan["stages"]["extract"]["bytes"] < bound["stages"]["extract"]["bytes"]
    assert "upper bound" in bound["stages"]["extract"]["how"]["bytes"]
    measured = plan["measured"]
    assert 0.5 < measured["states_share"] < 1.0
    assert measured["extract_tokens_per_s"] > 0
    tokens = sum(s.num_aux_rows + 1 for s in TokenDataset(tmp_path / "prepare"))
    seconds = measured["extract_start_s"] + tokens / measured["extract_tokens_per_s"]
    assert plan["stages"]["extract"]["seconds"] == pytest.approx(seconds, rel=1e-6)
    at_least = 12 * measured["train_s_per_step"] + measured["train_start_s"]
    assert plan["stages"]["train"]["seconds"] >= at_least
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "plan.json"]


def test_a_recipe_that_keeps_its_best_draft_is_measured_on_answers_longer_than_a_step(tmp_path):
    save_target(tmp_path / "target")
    write_rows(tmp_path / "rows.jsonl", 20, longest=90)
    train = {"dtype": "float32", "batch_rows": 2, "eval_every": 5, "load_best_model_at_end": True}
    recipe = _recipe(tmp_path, train=train)
    # A handful of samples, each a step: they are gone over until all steps are made.
    measured = paceline.plan(recipe, measure=True, measure_tokens=64, measure_steps=8)["measured"]
    assert measured["train_s_per_step"] > 0


def test_answers_that_are_to_be_written_have_the_length_that_is_told(tmp_path):
    save_target(tmp_path / "target")
    rows = [{"prompt": "red sky"}, {"turns": ["blue", "lamp and door"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    groups = {"prepare": {}, "generate": {"data": [str(tmp_path / "rows.jsonl")]}}
    recipe = _recipe(tmp_path, **groups)
    longest = paceline.plan(recipe, ["generate.max_new_tokens=50"], flops=1e12)
    assert longest["data"]["supervised_tokens"] == 3 * 50
    told = paceline.plan(recipe, answer_tokens=20, flops=1e12)
    assert told["data"]["supervised_tokens"] == 3 * 20
    assert longest["data"]["tokens"] - told["data"]["tokens"] == 3 * 30
    assert list(told["stages"]) == list(plan_stages(load_recipe(recipe)))
    measured = paceline.plan(
        recipe, ["generate.max_new_tokens=9"], measure=True, measure_steps=8, measure_tokens=200
    )
    assert 0 < measured["measured"]["answer_tokens"] <= 9
    assert measured["measured"]["generate_tokens_per_s"] > 0


def test_kimi_is_planned_from_its_config_alone(tmp_path):
    folder = write_config(tmp_path / "kimi", KIMI_K25)
    plan = paceline.plan(
        str(RECIPES / "kimi-k2.5.yaml"),
        [f"target={folder}", f"run_dir={tmp_path / 'run'}"],
        rows=50_000,
        tokens_per_row=2_000,
        supervised_share=0.5,
        device="cuda",
        devices=8,
        flops=7e14,
        price_per_hour=2.5,
    )
    rows, supervised = 50_000 * (2_000 - 1), 50_000 * 1_000
    # int8: a byte a value, a bfloat16 scale for each group of 128.
    states = (rows * 3 + supervised) * 7168 * (1 + 2 / 128)
    extract = plan["stages"]["extract"]
    assert extract["bytes"] == pytest.approx(states, rel=0.01)
    assert extract["device_bytes"] == pytest.approx(595e9 / 8, rel=0.02)
    assert not plan["disk"]["fits"]
    hours = plan["total"]["seconds"] / 3600
    assert plan["total"]["cost"] == pytest.approx(hours * 8 * 2.5)
    assert plan["stages"]["train"]["device_bytes"] < 80e9


def test_qwen3_8b_is_planned_for_one_gpu_of_80_gb(tmp_path):
    folder = write_config(tmp_path / "qwen", QWEN3_8B)
    plan = paceline.plan(
        str(RECIPES / "qwen3-8b.yaml"),
        [f"target={folder}", f"run_dir={tmp_path / 'run'}"],
        rows=60_000,
        tokens_per_row=800,
        supervised_share=0.75,
        device="cuda",
        flops=H100_FLOPS,
    )
    stages = plan["stages"]
    assert stages["extract"]["device_bytes"] == pytest.approx(16.4e9, rel=0.01)
    assert max(s["device_bytes"] for s in stages.values()) < 80e9
    # fc 3 x 4096 wide, a layer with queries, keys and values of 2 x 4096, a head of 32,000.
    layer = 8192 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    draft = 3 * 4096 * 4096 + layer + 32_000 * 4096
    assert stages["export"]["bytes"] == pytest.approx(2 * draft, rel=0.01)
    steps = 60_000 * 600 * 0.98 * 3 // 4096
    assert f"{steps:,.0f} steps" in stages["train"]["how"]["seconds"]
    # 800 tokens at 3/4 of the rate; per token two operations a weight of 36 layers, scores apart.
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    least = 60_000 * 800 * 2 * weights / (0.75 * H100_FLOPS)
    assert least < stages["extract"]["seconds"] < 1.1 * least


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_recipe_has_its_stages(path):
    assert "train" in plan_stages(load_recipe(path))


def test_what_is_not_there_is_told_with_the_way_out(tmp_path):
    target = write_config(tmp_path / "target", QWEN3_8B)
    with pytest.raises(UsageError, match=r"rows.jsonl: no such file. To plan before .* --rows"):
        paceline.plan(_recipe(tmp_path), flops=1e12)
    write_rows(tmp_path / "rows.jsonl", 3)
    with pytest.raises(TargetError, match=r"has no tokenizer\. .*--rows"):
        paceline.plan(_recipe(tmp_path), flops=1e12)
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataError, match="no rows to plan by"):
        paceline.plan(_recipe(tmp_path), flops=1e12)
    with pytest.raises(UsageError, match="no GPU is here to time: pass `flops`"):
        paceline.plan(_recipe(tmp_path), rows=10, device="cuda")
    shutil.rmtree(target)
    with pytest.raises(TargetError, match=r"config.json alone is enough to plan"):
        paceline.plan(_recipe(tmp_path), rows=10, flops=1e12)


def test_a_run_that_does_not_fit_is_a_failed_check_with_both_numbers(tmp_path):
    write_config(tmp_path / "target", QWEN3_8B)
    sizes = ["--rows", "1000000000", "--tokens-per-row", "4000", "--flops", "1e15"]
    recipe = _recipe(tmp_path)
    override = "prepare.max_length=4096"
    done = program("plan", recipe, override, *sizes)
    assert done.returncode == 1, done.stderr
    assert re.search(r"has [\d.]+ [GMT]B free, the run needs [\d,.]+ TB at its larg", done.stderr)
    assert "in all" in done.stdout


def test_run_keeps_a_plan_of_its_recipe(tiny_run):
    plan = json.loads((tiny_run / "plan.json").read_text())
    recipe = load_recipe(tiny_run.parent / "recipe.yaml")
    assert plan["recipe"] == recipe.model_dump(mode="json", exclude_unset=True)
    assert plan["total"]["bytes"] > 0
    before = (tiny_run / "plan.json").read_bytes()
    paceline.run(recipe, overrides=[])
    assert (tiny_run / "plan.json").read_bytes() == before


def test_a_plan_of_another_recipe_goes_and_none_is_made_of_what_has_begun(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns("report"))
    changes = [f"run_dir={tmp_path / 'run'}", "report.title=Another"]
    paceline.run(str(tiny_run.parent / "recipe.yaml"), changes)
    assert not (tmp_path / "run" / "plan.json").exists()
    assert (tmp_path / "run" / "report" / "index.html").is_file()
