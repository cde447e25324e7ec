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
from paceline.recipe import RunOptions
from paceline.stages import TIMES_FILE, plan_stages, recipe_of
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
