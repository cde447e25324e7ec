"""A draft from target weights and on-policy answers in one GPU's ten minutes, then its figures.

    python benchmarks/kept_draft.py --train train.jsonl.gz --eval eval.jsonl.gz

Runs the stages of recipes/smollm2-135m.yaml up to the checkpoint and takes the time, then measures
the draft on the answers of `--eval` (their sources apart and pooled) beside the baselines, which is
not in the time. `--also` trains further drafts on the same features with other settings. One JSON
object on stdout.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import paceline
from paceline.recipe import RunOptions
from paceline.stages import plan_stages, recipe_of

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2-135m.yaml"
CHAINS = [3, 5, 7]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--out", default="runs/smollm2-135m")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--also", nargs="*", default=[], metavar="KEY=VALUE,KEY=VALUE")
    options = parser.parse_args()
    out = Path(options.out)
    result: dict[str, Any] = {"seconds": {}, "drafts": {}}
    stages = stages_of(out, options.train, options.set)
    for name in ("prepare", "extract", "align", "train"):
        result["seconds"][name] = run_stage(name, stages[name])
    answers = eval_store(out, options.eval, stages)
    result["drafts"]["recipe"] = measure(stages["train"].out, answers, out / "measured")
    for number, settings in enumerate(options.also):
        folder = str(out / f"train-{number}")
        changed = [*options.set, *settings.split(","), f"train.out={folder}"]
        again = stages_of(out, options.train, changed)
        seconds = run_stage("train", again["train"])
        result["drafts"][settings] = {
            "seconds": seconds,
            **measure(folder, answers, out / f"measured-{number}"),
        }
    print(json.dumps(result))


def stages_of(out: Path, data: list[str], settings: list[str]) -> dict[str, Any]:
    given = [f"run_dir={out}", f"prepare.data={json.dumps(data)}", *settings]
    return plan_stages(recipe_of(RunOptions(recipe=str(RECIPE), overrides=given)))


def run_stage(name: str, stage_options: Any) -> float:
    started = time.monotonic()
    importlib.import_module(f"paceline.{name}").VERB[1](stage_options)
    seconds = round(time.monotonic() - started, 1)
    print(f"{name}: {seconds} s", file=sys.stderr)
    return seconds


def eval_store(out: Path, data: str, stages: dict[str, Any]) -> str:
    """Features of the answers that the draft is measured on."""
    extract = stages["extract"]
    target = stages["prepare"].target
    tokens = str(out / "eval-prepare")
    paceline.prepare(target=target, data=[data], out=tokens, split="heldout")
    store = str(out / "eval-extract")
    paceline.extract(
        data=tokens, out=store, dtype=extract.dtype, max_batch_tokens=extract.max_batch_tokens
    )
    return store


def measure(draft: str, store: str, out: Path) -> dict[str, Any]:
    """{K: {source or "pooled": acceptance length}} of the draft and of prompt lookup."""
    found = paceline.evaluate(draft=draft, store=store, out=str(out), num_draft_tokens=CHAINS)
    tables = {"draft": found["results"], **found["baselines"]}
    return {name: {k: lengths(table) for k, table in t.items()} for name, t in tables.items()}


def lengths(table: dict[str, Any]) -> dict[str, Any]:
    rows = {"pooled": table["pooled"], **table["sources"]}
    return {name: round(row["acceptance_length"], 3) for name, row in rows.items()}


if __name__ == "__main__":
    main()
