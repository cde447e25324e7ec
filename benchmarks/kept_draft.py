"""A draft from target weights and on-policy answers in ten minutes of one GPU, kept in 8 bits.

    python benchmarks/kept_draft.py --data FOLDER --scratch FOLDER --out FOLDER

Runs the stages of recipes/smollm2-135m.yaml up to the checkpoint, in one process, and takes the
time, loading of torch included. What follows is not in the time: the draft is exported
and rounded to 8 bits, the rounded one is measured on the answers of `eval` and `heldout` beside
prompt lookup, and kept with its figures. OUT gets compact.json and compact.safetensors (the kept
draft), log.jsonl (the curve) and kept.json (what the last line of stdout says). FOLDER of `--data`:
see sweep.py.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from sweep import CHAINS, Setting, common_parser, lengths, plan, run_stage

import paceline


def main() -> None:
    options, started = common_parser(__doc__).parse_args(), time.monotonic()
    setting = plan(options, "kept", None)
    result: dict[str, Any] = {"seconds": {}}
    for verb in ("prepare", "align", "extract", "train"):
        result["seconds"][verb] = run_stage(verb, setting.stages[verb])
    result["seconds"]["all"] = round(time.monotonic() - started, 1)
    for verb in ("prepare", "extract"):
        run_stage(verb, setting.answers[verb])
    train = Path(setting.stages["train"]["out"])
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(train / "log.jsonl", options.out)
    result |= keep(train, setting, options.scratch, options.out)
    (options.out / "kept.json").write_text(json.dumps(result))
    print(json.dumps(result))


def keep(train: Path, setting: Setting, scratch: Path, out: Path) -> dict[str, Any]:
    """Round, measure, keep. Returns sizes and acceptance lengths."""
    rounded, measured_in = scratch / "rounded", scratch / "measured"
    paceline.export(draft=str(train), out=str(rounded), compact=True, overwrite=True)
    common = {
        "store": setting.answers["extract"]["out"],
        "num_draft_tokens": CHAINS,
        "overwrite": True,
    }
    exact = paceline.evaluate(
        draft=str(train), out=str(scratch / "exact"), baselines=False, **common
    )
    measured = paceline.evaluate(draft=str(rounded / "compact"), out=str(measured_in), **common)
    kept = paceline.export(
        draft=str(rounded / "compact"),
        evaluate=str(measured_in),
        out=str(scratch / "export"),
        compact=True,
        overwrite=True,
    )["compact"]
    for file in Path(kept["folder"]).iterdir():
        shutil.copy(file, out)
    methods = {"draft": measured["results"], "unrounded": exact["results"]}
    methods |= measured["baselines"]
    return {
        "kept": {"bytes": kept["bytes"], "head": kept["head"]},
        "lengths": {name: lengths(tables) for name, tables in methods.items()},
    }


if __name__ == "__main__":
    main()
