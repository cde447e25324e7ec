"""Many settings of recipes/smollm2-135m.yaml trained on the same features, several at once on the
GPUs of one machine, each measured by the exact server-free evaluation.

    python benchmarks/sweep.py --data FOLDER --scratch FOLDER --out FOLDER --jobs-per-gpu 3

FOLDER of `--data` holds train, eval and heldout `.jsonl.gz` (rows with `source`, `prompt_ids`,
`response_ids`). Settings are in `--settings` (benchmarks/sweep.yaml): names with overrides of the
recipe. Stages with equal options are done once. Each finished setting adds a line to
OUT/results.jsonl; what processes say goes to SCRATCH/logs. After `--seconds` what still trains is
ended, its last record told. The last line of stdout is one JSON object with all of them.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from paceline import fingerprint
from paceline.recipe import RunOptions, build
from paceline.stages import plan_stages, recipe_of

HERE = Path(__file__).parent
CHAINS = [3, 5, 7]
MEASURED = ("eval", "heldout")
OWN_KIND = "magpie"  # the source of held-out chats; all others are prompt sets
LEAST_S = 20.0  # a training that begins with less time left cannot end


@dataclass(frozen=True)
class Setting:
    """stages: options of prepare, extract, align and train, as JSON can say them, with the folders
    of the stages before filled in; answers: those of what it is measured on."""

    name: str
    overrides: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    answers: dict[str, dict[str, Any]]


@dataclass
class Machine:
    """Runs stages in processes of their own, no longer than until `deadline`. gpus: one entry for
    each job that may run at a time; empty for the CPU."""

    logs: Path
    deadline: float
    gpus: SimpleQueue = field(default_factory=SimpleQueue)

    def run(
        self, name: str, work: list[dict[str, Any]], gpu: str | None = None, threads: int = 2
    ) -> None:
        """Stages one after the other in one process; its messages go to NAME.txt, the last of
        them are shown where it fails. Raises CalledProcessError, TimeoutExpired."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        path = self.logs / f"{name}.txt"
        command = [sys.executable, __file__, "--work", json.dumps(work)]
        left = max(self.deadline - time.monotonic(), 1.0)
        try:
            with path.open("w") as log:
                subprocess.run(
                    command, env=environment, stdout=log, stderr=log, timeout=left, check=True
                )
        except subprocess.SubprocessError:
            say(f"{name}: {path.read_text()[-2000:]}")
            raise


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
        return
    options = parse()
    started = time.monotonic()
    chosen = yaml.safe_load(options.settings.read_text())
    names = options.only or list(chosen)
    settings = [plan(options, name, chosen[name]) for name in names]
    machine = machine_of(options, started + options.seconds)
    gpus = gpus_of(options.gpus)
    for gpu in gpus * options.jobs_per_gpu:
        machine.gpus.put(gpu)
    features(machine, settings, gpus)
    say(f"features ready after {time.monotonic() - started:.0f} s")
    with ThreadPoolExecutor(len(gpus) * options.jobs_per_gpu) as pool:
        results = options.out / "results.jsonl"
        rows = list(pool.map(lambda setting: trained(machine, setting, results), settings))
    say(table(rows))
    print(json.dumps({"seconds": round(time.monotonic() - started), "settings": rows}))


def common_parser(about: str) -> argparse.ArgumentParser:
    """The options of all benchmarks that train on these data. about: the script's docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default=str(HERE.parent / "recipes" / "smollm2-135m.yaml"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of all settings")
    return parser


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--settings", type=Path, default=HERE / "sweep.yaml")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--gpus", type=int, default=1, help="0: the CPU")
    parser.add_argument("--jobs-per-gpu", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540.0)
    return parser.parse_args()


def gpus_of(count: int) -> list[str | None]:
    """The first of those that CUDA_VISIBLE_DEVICES leaves, or of all; [None] is the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else map(str, range(count))
    return list(numbers)[:count] or [None]


def machine_of(options: argparse.Namespace, deadline: float) -> Machine:
    logs = options.scratch / "logs"
    for folder in (logs, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    return Machine(logs, deadline)


def plan(options: argparse.Namespace, name: str, given: dict[str, Any] | None) -> Setting:
    """A setting's stages, each in a folder that is named by all that shapes it."""
    given = given or {}
    rows = [str(options.data / "train.jsonl.gz")]
    overrides = [f"{k}={json.dumps(value)}" for k, value in given.items()]
    common = [f"run_dir={options.scratch}", f"prepare.data={json.dumps(rows)}"]
    recipe = recipe_of(
        RunOptions(recipe=options.recipe, overrides=common + options.set + overrides)
    )
    stages = plan_stages(recipe)
    made = {"prepare": settle(options.scratch, stages["prepare"], {"data": rows})}
    made["extract"] = settle(options.scratch, stages["extract"], {"data": made["prepare"]["out"]})
    made["align"] = settle(options.scratch, stages["align"], {"data": made["prepare"]["out"]})
    inputs = {"store": made["extract"]["out"], "vocab": made["align"]["out"]}
    made["train"] = settle(options.scratch, stages["train"], inputs)
    files = [str(options.data / f"{part}.jsonl.gz") for part in MEASURED]
    asked = stages["prepare"].model_copy(update={"split": "heldout"})
    answers = {"prepare": settle(options.scratch, asked, {"data": files})}
    answers["extract"] = settle(
        options.scratch, stages["extract"], {"data": answers["prepare"]["out"]}
    )
    return Setting(name, given, made, answers)


def settle(scratch: Path, stage: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """A stage's options with its inputs, and a folder of its own by them."""
    verb = type(stage).__name__.removesuffix("Options").lower()
    key = fingerprint.of_json({"identity": stage.identity(), "inputs": inputs})
    out = scratch / f"{verb}-{key.rpartition(':')[2][:12]}"
    return {**stage.model_dump(mode="json"), **inputs, "out": str(out)}


def features(machine: Machine, settings: list[Setting], gpus: list[str | None]) -> None:
    """All that trainings read, each once, side by side."""
    chains: dict[str, list[dict[str, Any]]] = {}
    for setting in settings:
        for stages in (setting.stages, setting.answers):
            extract = stages["extract"]
            chain = chains.setdefault(extract["out"], [job("prepare", stages["prepare"])])
            wanted = [job(verb, stages[verb]) for verb in ("align", "extract") if verb in stages]
            chain += [one for one in wanted if one not in chain]
    with ThreadPoolExecutor(len(chains)) as pool:
        done = [
            pool.submit(machine.run, Path(out).name, chain, gpus[number % len(gpus)], 6)
            for number, (out, chain) in enumerate(chains.items())
        ]
    for one in done:
        one.result()


def job(verb: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"verb": verb, "options": options}


def trained(machine: Machine, setting: Setting, results: Path) -> dict[str, Any]:
    """Train and measure one setting; its line of results, written at once."""
    gpu, row = machine.gpus.get(), {"setting": setting.name, "overrides": setting.overrides}
    train = setting.stages["train"]
    measured = Path(train["out"]).with_name(f"measured-{Path(train['out']).name}")
    evaluate = {
        "draft": train["out"],
        "store": setting.answers["extract"]["out"],
        "out": str(measured),
        "num_draft_tokens": CHAINS,
        "baselines": False,
        "bootstrap": 100,
    }
    started = time.monotonic()
    try:
        if machine.deadline - started < LEAST_S:
            raise TimeoutError
        machine.run(setting.name, [job("train", train), job("evaluate", evaluate)], gpu)
        row |= lengths(json.loads((measured / "result.json").read_text())["results"])
    except (subprocess.SubprocessError, TimeoutError) as error:
        row["cut"] = type(error).__name__
    finally:
        machine.gpus.put(gpu)
    row |= course(Path(train["out"]))
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    say(table([row]))
    return row


def course(folder: Path) -> dict[str, Any]:
    """What a training's log says of it at last, and all its looks at held-out data."""
    log = folder / "log.jsonl"
    if not log.exists():
        return {}
    lines = list(map(json.loads, log.read_text().splitlines()))
    records = [line for line in lines if "loss" in line]
    if not records:
        return {}
    last = records[-1]
    rows = sum(r["rows"] for r in records) / len(records) * (last["step"] + 1)
    return {
        "steps": last["step"] + 1,
        "train_s": round(last["elapsed_s"], 1),
        "rows_per_s": round(rows / last["elapsed_s"]),
        "waited": round(sum(r["wait_share"] for r in records) / len(records), 3),
        "loss": round(last["loss"], 4),
        "train_acceptance": [a and round(a, 3) for a in last["train"]["acceptance_rate"]],
        "looks": [
            [line["step"], round(line["heldout"]["acceptance"]["acceptance_length"], 3)]
            for line in lines
            if "heldout" in line
        ],
    }


def lengths(results: dict[str, Any]) -> dict[str, Any]:
    """Acceptance lengths by K: the prompt sets pooled, each of them, and the held-out chats."""
    found: dict[str, Any] = {"six": {}, "heldout": {}, "sets": {}}
    for k, measured in results.items():
        sources = measured["sources"]
        found["six"][k] = pooled(row for name, row in sources.items() if name != OWN_KIND)
        found["heldout"][k] = pooled(row for name, row in sources.items() if name == OWN_KIND)
        found["sets"][k] = {name: pooled([row]) for name, row in sources.items()}
    return found


def pooled(rows: Iterable[dict[str, Any]]) -> float | None:
    """By the one definition: 1 + accepted / verify steps, sums over the rows."""
    rows = list(rows)
    steps = sum(row["verify_steps"] for row in rows)
    return round(1 + sum(row["accepted"] for row in rows) / steps, 3) if steps else None


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        six, own = (
            " / ".join(str(row.get(part, {}).get(str(k))) for k in CHAINS)
            for part in ("six", "heldout")
        )
        lines.append(
            f"{row['setting']:24s} six {six:21s} heldout {own:21s} {row.get('steps', 0):6d} steps "
            f"{row.get('train_s', 0):6.1f} s {row.get('rows_per_s', 0):7d} rows/s "
            f"waited {row.get('waited', 0):.2f} {row.get('cut', '')}"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def work(jobs: list[dict[str, Any]]) -> None:
    """In a process of its own."""
    for one in jobs:
        run_stage(one["verb"], one["options"])


def run_stage(verb: str, options: dict[str, Any]) -> float:
    """In this process. Returns and says the seconds."""
    started = time.monotonic()
    model, run = importlib.import_module(f"paceline.{verb}").VERB
    run(build(model, options))
    seconds = round(time.monotonic() - started, 1)
    say(f"{verb}: {seconds} s")
    return seconds


if __name__ == "__main__":
    main()
