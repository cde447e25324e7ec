"""`run`: a recipe from conversations to the page; finished stages are skipped by fingerprint.

It keeps a plan (`plan.json`) and the time that each stage took (`run.json`); the work is the
stages' own.
"""

import importlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from paceline.artefact import COMPLETE, load_manifest, write_json
from paceline.contracts import MANIFEST_NAME
from paceline.errors import FingerprintMismatch, PacelineError, UsageError
from paceline.recipe import ExtractOptions, PlanOptions, Recipe, RunOptions, StageOptions
from paceline.stages import PLAN_FILE, TIMES_FILE, plan_stages, read_kept, recipe_of
from paceline.store import run_pair
from paceline.store.files import published_bytes
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)

_MODULES = {"generate": "paceline.prepare.generate"}


def run(options: RunOptions) -> dict[str, Any]:
    """Run all stages of a recipe in order.

    Returns {"run_dir", "stages": {name: {"folder", "seconds", "skipped", "result"}}, "page"};
    seconds are those of this run. Raises whatever the stage that failed raises; the stages before
    it are finished, and the same call goes on.
    """
    recipe = recipe_of(options)
    planned = _overwriting(plan_stages(recipe), options.overwrite_from)
    folder = Path(recipe.run_dir)
    _look_ahead(recipe, planned)
    folder.mkdir(parents=True, exist_ok=True)
    plan_path = folder / PLAN_FILE
    if not _is_plan_of(recipe, plan_path):
        _make_plan(recipe, planned, plan_path)
    times = StageTimes(folder / TIMES_FILE)

    def run_stage(name: str) -> dict[str, Any]:
        return _run_stage(name, planned[name], times)

    stages = {}
    for name in planned:
        if recipe.overlap and name == "extract":
            planned[name] = _streamed(planned[name])
            stages["extract"], stages["train"] = run_pair(
                planned[name].out, lambda: run_stage("extract"), lambda: run_stage("train")
            )
        elif name not in stages:
            # Nothing is held against a plan of another recipe; it stays where the run is refused.
            if name == "report" and not _is_plan_of(recipe, plan_path):
                plan_path.unlink(missing_ok=True)
            stages[name] = run_stage(name)
    return {"run_dir": str(folder), "stages": stages, "page": stages["report"]["result"]["page"]}


def _overwriting(planned: dict[str, StageOptions], first: str | None) -> dict[str, StageOptions]:
    """The stages with leave to start over from `first` on, and where the recipe gives it: in a run
    that is for other work alone, since a finished stage is skipped, whatever its options."""
    if first is not None and first not in planned:
        raise UsageError(
            f"overwrite_from: the recipe has no `{first}`; its stages are {', '.join(planned)}"
        )
    names = list(planned)
    allowed = set(names[names.index(first) :] if first else ())
    return {
        name: stage.model_copy(update={"overwrite": "other"})
        if name in allowed or stage.overwrite
        else stage
        for name, stage in planned.items()
    }


def _run_stage(name: str, options: StageOptions, times: "StageTimes") -> dict[str, Any]:
    module = importlib.import_module(_MODULES.get(name, f"paceline.{name}"))
    with times.measure(name, options.out) as measured, _advice_of_a_run(name):
        result = module.VERB[1](options)
    logger.info("%-9s %s", name, measured)
    return {
        "folder": options.out,
        "seconds": measured.seconds,
        "skipped": measured.skipped,
        "result": result,
    }


@contextmanager
def _advice_of_a_run(stage: str) -> Iterator[None]:
    """A stage that finds other work advises what its own command takes; `run` takes another."""
    try:
        yield
    except FingerprintMismatch as error:
        if not error.advice:
            raise
        raise FingerprintMismatch(
            error.found,
            f"Choose another `run_dir`, or pass overwrite_from (--overwrite-from {stage}): from "
            "there on, stages whose folders hold other work start over.",
        ) from error


def _streamed(options: ExtractOptions) -> ExtractOptions:
    """With a byte budget, as an extraction needs that a training beside it may stop."""
    if options.stream_bytes is not None:
        return options
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    room = published_bytes(folder) + shutil.disk_usage(folder).free // 2
    return options.model_copy(update={"stream_bytes": room})


def _look_ahead(recipe: Recipe, planned: dict[str, StageOptions]) -> None:
    """Refuse what late stages would, before the first one begins."""
    to_come = {
        name
        for name, options in planned.items()
        if options.overwrite or _state(options.out)[1] != COMPLETE
    }
    if to_come:
        importlib.import_module("paceline.ahead").look_ahead(recipe, planned, to_come)


def _is_plan_of(recipe: Recipe, path: Path) -> bool:
    plan = read_kept(path, "recipe")
    return plan is not None and plan["recipe"] == recipe.model_dump(mode="json", exclude_unset=True)


def _make_plan(recipe: Recipe, planned: dict[str, StageOptions], path: Path) -> None:
    """A plan of this recipe beside the stages, so that the page can hold it against what came
    (`paceline plan --measure` makes a better one). Nothing is foretold of a run that has begun."""
    if any((Path(options.out) / MANIFEST_NAME).is_file() for options in planned.values()):
        return
    try:
        plan = importlib.import_module("paceline.plan")
        made = plan.VERB[1](PlanOptions(recipe=recipe, out=str(path)))
    except PacelineError as error:
        logger.warning("run: no plan was made: %s", error)
        return
    gigabytes, minutes = made["total"]["bytes"] / 1e9, made["total"]["seconds"] / 60
    logger.info("plan: about %.1f GB and very roughly %.0f min; see %s", gigabytes, minutes, path)
    if not made["disk"]["fits"]:
        logger.warning(
            "run: %s has no room for all of it: %s", made["disk"]["folder"], made["disk"]
        )


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
        self._lock = Lock()
        known = read_kept(path, "stages")
        self._stages: dict[str, dict[str, Any]] = known["stages"] if known else {}

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
                self._keep(stage, after[0], measured.seconds)

    def _keep(self, stage: str, created: str, seconds: float) -> None:
        with self._lock:
            known = self._stages.get(stage, {})
            spent = known["seconds"] if known.get("created") == created else 0.0
            self._stages[stage] = {"created": created, "seconds": spent + seconds}
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
