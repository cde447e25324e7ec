"""A draft from target weights and on-policy answers in ten minutes of one GPU, kept in 8 bits.

    python benchmarks/kept_draft.py --data FOLDER --scratch FOLDER --out FOLDER

Runs the stages of recipes/smollm2-135m.yaml up to the checkpoint, in one process, and takes the
time, loading of torch included. What follows is not in the time: the draft is exported
and rounded to 8 bits, the rounded one is measured on the answers of `eval` and `heldout` beside
prompt lookup, and kept with its figures in OUT/export/compact. FOLDER of `--data`: see sweep.py.
One JSON object on the last line of stdout.
"""

import argparse
import importlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from sweep import CHAINS, Setting, lengths, plan, say

import paceline
from paceline.recipe import build

HERE = Path(__file__).parent


def main() -> None:
    options, started = parse(), time.monotonic()
    setting = plan(options, "kept", {"teach_prompts": options.teach_prompts})
    result: dict[str, Any] = {"seconds": {}}
    for verb in ("prepare", "align", "extract", "train"):
        result["seconds"][verb] = run(verb, setting.stages[verb])
    result["seconds"]["all"] = round(time.monotonic() - started, 1)
    for verb in ("prepare", "extract"):
        run(verb, setting.answers[verb])
    train = Path(setting.stages["train"]["out"])
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(train / "log.jsonl", options.out / "log.jsonl")
    result |= keep(train, setting, options.out)
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default=str(HERE.parent / "recipes" / "smollm2-135m.yaml"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--teach-prompts", action="store_true")
    return parser.parse_args()


def run(verb: str, options: dict[str, Any]) -> float:
    started = time.monotonic()
    model, function = importlib.import_module(f"paceline.{verb}").VERB
    function(build(model, options))
    seconds = round(time.monotonic() - started, 1)
    say(f"{verb}: {seconds} s")
    return seconds


def keep(train: Path, setting: Setting, out: Path) -> dict[str, Any]:
    """Round, measure, keep. Returns sizes and acceptance lengths."""
    rounded = out / "rounded"
    paceline.export(draft=str(train), out=str(rounded), compact=True, overwrite=True)
    common = {
        "store": setting.answers["extract"]["out"],
        "num_draft_tokens": CHAINS,
        "overwrite": True,
    }
    exact = paceline.evaluate(draft=str(train), out=str(out / "exact"), baselines=False, **common)
    measured = paceline.evaluate(
        draft=str(rounded / "compact"), out=str(out / "measured"), **common
    )
    kept = paceline.export(
        draft=str(rounded / "compact"),
        evaluate=str(out / "measured"),
        out=str(out / "export"),
        compact=True,
        overwrite=True,
    )
    shutil.rmtree(rounded)
    methods = {"draft": measured["results"], "unrounded": exact["results"]}
    methods |= measured["baselines"]
    return {
        "kept": kept["compact"],
        "lengths": {name: lengths(tables) for name, tables in methods.items()},
    }


if __name__ == "__main__":
    main()
