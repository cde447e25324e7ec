"""Which engines captured a store: each is probed before it may store a sample.

A run that goes on may have another engine than the one it began with, a newer vLLM or other
`engine_options`; what the first probe saw says nothing of that one.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.artefact import differences, write_json
from paceline.contracts import TokenSample
from paceline.errors import ProbeFailure
from paceline.extract.engine import Engine
from paceline.extract.probe import ProbeResult, choose_prompts, run_probe
from paceline.extract.reference import choose_reference_layers
from paceline.recipe import ExtractOptions
from paceline.store import StoreSpec
from paceline.target.spec import Target

logger = logging.getLogger(__name__)

# Resolved choices and what the probes saw, kept from the first start on: a resumed run must go on
# in the dtype it began in, whatever a new timing would choose.
START_FILE = "start.json"
# The probe's own store. It lies in the folder of the run: engines on other machines see that, and
# not this machine's temporary folder.
_PROBE_FOLDER = ".probe"
# Settings that say what room an engine found, not how it computes: they differ between starts.
_ROOM = ("kv_blocks",)


def read_start(folder: Path) -> dict[str, Any]:
    """Empty before the first probe, else `dtype`, what is known of the first engine (`engine`,
    `engine_options`, `versions`, `probe`), and `later_engines`: a list of the same four."""
    path = folder / START_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def ensure_probed(
    options: ExtractOptions,
    folder: Path,
    engine: Engine,
    target: Target,
    spec: StoreSpec,
    samples: list[TokenSample],
) -> dict[str, Any]:
    """Probe the engine, unless this store was captured by one like it before, and write down what
    was seen. Returns the probe's result. Raises ProbeFailure."""
    start = read_start(folder)
    _remove_probe(folder)  # of a run that was killed in its probe
    now = _describe(engine, options)
    known = [start, *start.get("later_engines", [])] if start else []
    for before in known:
        if _shaping(before) == _shaping(now):
            return before["probe"]
    if not start:
        now["probe"] = _probe(options, folder, engine, target, spec, samples).as_dict()
        write_json(folder / START_FILE, {"dtype": spec.dtype, **now, "later_engines": []})
        return now["probe"]
    change = "; ".join(differences(_shaping(start), _shaping(now)))
    logger.warning("%s was begun with another engine, so this one is probed: %s", folder, change)
    try:
        now["probe"] = _probe(options, folder, engine, target, spec, samples).as_dict()
    except ProbeFailure as error:
        raise ProbeFailure(
            f"{error} {folder} was begun with another engine ({change}): go on with that one, or "
            "remove the folder to start over"
        ) from error
    write_json(folder / START_FILE, {**start, "later_engines": [*known[1:], now]})
    return now["probe"]


def _describe(engine: Engine, options: ExtractOptions) -> dict[str, Any]:
    """As JSON gives it back, so that it compares equal to what was read."""
    said = {
        "engine": asdict(engine.info),
        "engine_options": options.engine_options,
        "versions": fingerprint.package_versions(),
    }
    return json.loads(json.dumps(said))


def _shaping(described: dict[str, Any]) -> dict[str, Any]:
    """What may change the states that an engine gives."""
    engine = described["engine"]
    settings = {k: v for k, v in engine["settings"].items() if k not in _ROOM}
    # The first stores wrote down the engine alone.
    more = {name: described.get(name) for name in ("engine_options", "versions")}
    return {"engine": {**engine, "settings": settings}, **more}


def _probe(
    options: ExtractOptions,
    folder: Path,
    engine: Engine,
    target: Target,
    spec: StoreSpec,
    samples: list[TokenSample],
) -> ProbeResult:
    reference_layers = 0
    if not options.waive_reference:
        reference_layers = choose_reference_layers(target, spec.dtype, options.reference_layers)
    with _probe_folder(folder) as scratch:
        return run_probe(
            engine,
            target,
            # The probe judges the engine, so a lossy codec must not stand between.
            replace(spec, codec="raw"),
            choose_prompts(samples, options.probe_samples),
            scratch,
            reference_layers,
        )


@contextmanager
def _probe_folder(folder: Path) -> Iterator[Path]:
    path = folder / _PROBE_FOLDER
    path.mkdir()
    try:
        yield path
    finally:
        _remove_probe(folder)


def _remove_probe(folder: Path) -> None:
    # A shared file system may keep files that a process still maps: those go with the next start.
    shutil.rmtree(folder / _PROBE_FOLDER, ignore_errors=True)
