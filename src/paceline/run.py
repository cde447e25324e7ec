"""`run`: a recipe from conversations to the page; finished stages are skipped by fingerprint.

It only fills in what follows from the order of the stages (folders, target) and keeps the time
that each stage took in `run.json`; the work is the stages' own.
"""

import importlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.artefact import COMPLETE, load_manifest, write_json
from paceline.errors import UsageError
from paceline.recipe import (
    Recipe,
    RunOptions,
    StageOptions,
    TargetOptions,
    build,
    load_recipe,
    override_recipe,
)
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)

TIMES_FILE = "run.json"
_MODULES = {"generate": "paceline.prepare.generate"}


def run(options: RunOptions) -> dict[str, Any]:
    """Run all stages of a recipe in order.

    Returns {"run_dir", "stages": {name: {"folder", "seconds", "skipped", "result"}}, "page"};
    seconds are those of this run. Raises whatever the stage that failed raises; the stages before
    it are finished, and the same call goes on.
    """
    if isinstance(options.recipe, Recipe):
        recipe = override_recipe(options.recipe, options.overrides)
    elif options.recipe:
        recipe = load_recipe(options.recipe, options.overrides)
    else:
        raise UsageError("run: pass `recipe`, a YAML file; docs/run.md shows one")
    planned = plan_stages(recipe)
    folder = Path(recipe.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    times = StageTimes(folder / TIMES_FILE)
    stages = {}
    for name, stage_options in planned.items():
        module = importlib.import_module(_MODULES.get(name, f"paceline.{name}"))
        with times.measure(name, stage_options.out) as measured:
            result = module.VERB[1](stage_options)
        logger.info("%-9s %s", name, measured)
        stages[name] = {
            "folder": stage_options.out,
            "seconds": measured.seconds,
            "skipped": measured.skipped,
            "result": result,
        }
    return {"run_dir": str(folder), "stages": stages, "page": stages["report"]["result"]["page"]}


def plan_stages(recipe: Recipe) -> dict[str, StageOptions]:
    """Each stage's options with its folders and target filled in, in the order of the work.

    What the recipe says itself stays as it is.
    """
    if not recipe.target:
        raise UsageError("recipe: no `target`: a folder, a Hub id or pkg:PACKAGE/FILE")
    if recipe.generate and recipe.prepare.data:
        raise UsageError(
            "recipe: `generate` and `prepare.data` are both given. With `generate`, prepare reads "
            "the answers: name the conversations as `generate.data`."
        )
    folder = Path(recipe.run_dir)
    at = lambda stage: str(folder / stage)
    links: dict[str, dict[str, Any]] = {
        "generate": {},
        "prepare": {"data": [at("generate")]} if recipe.generate else {},
        "extract": {"data": at("prepare")},
        "align": {"data": at("prepare")},
        "train": {"store": at("extract"), "vocab": at("align")},
        "evaluate": {"draft": at("train"), "store": at("extract"), "data": at("prepare")},
        "export": {"draft": at("train"), "evaluate": at("evaluate")},
        "report": {"run_dir": str(folder)},
    }
    planned = {}
    for stage, inputs in links.items():
        given: StageOptions | None = getattr(recipe, stage)
        if given is not None:
            planned[stage] = _filled(recipe, given, {"out": at(stage), **inputs})
    return planned


def _filled(recipe: Recipe, given: StageOptions, links: dict[str, Any]) -> StageOptions:
    values = given.model_dump()
    if isinstance(given, TargetOptions) and not given.target:
        links |= {name: getattr(recipe, name) for name in TargetOptions.model_fields}
    values.update({name: link for name, link in links.items() if not values[name]})
    return build(type(given), values, where="recipe")


class Measured:
    """What one stage took. `skipped`: the folder was finished before."""

    seconds = 0.0
    skipped = False

    def __str__(self) -> str:
        return "finished before" if self.skipped else f"{self.seconds:,.1f} s"


class StageTimes:
    """`run.json`: seconds that each stage's folder took, added up over interrupted runs.

    {"stages": {name: {"created", "seconds"}}}; `created` is that of the folder's manifest, so that
    a folder made anew starts at zero.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stages: dict[str, dict[str, Any]] = {}
        if path.is_file():
            try:
                self._stages = json.loads(path.read_text())["stages"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise UsageError(f"{path} is damaged ({error}): remove it") from error

    @contextmanager
    def measure(self, stage: str, folder: str) -> Iterator[Measured]:
        """Time a stage; kept whether it ends well, fails or is stopped."""
        measured = Measured()
        before, started = _state(folder), time.monotonic()
        try:
            yield measured
        finally:
            after = _state(folder)
            measured.seconds = time.monotonic() - started
            measured.skipped = before == after and after[1] == COMPLETE
            if not measured.skipped:
                known = self._stages.get(stage, {})
                spent = known["seconds"] if known.get("created") == after[0] else 0.0
                self._stages[stage] = {"created": after[0], "seconds": spent + measured.seconds}
                write_json(self._path, {"stages": self._stages})


def _state(folder: str) -> tuple[str, str, str | None]:
    """Created, status and finished of a folder's manifest; empty where there is none."""
    try:
        manifest = load_manifest(folder)
    except UsageError:
        return "", "", None
    return manifest.created, manifest.status, manifest.finished


VERB: tuple[type[RunOptions], Callable[[RunOptions], dict[str, Any]]] = (RunOptions, run)
make_callable(__name__)
