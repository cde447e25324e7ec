"""Everything that the page tells, read from the folders of a run: nothing is computed anew."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.artefact import FolderSize, Manifest, folder_size, load_manifest
from paceline.contracts import MANIFEST_NAME
from paceline.errors import StoreError, UsageError
from paceline.recipe import STAGES
from paceline.runlog import TrainingLog, read_log
from paceline.stages import PLAN_FILE, TIMES_FILE, read_kept
from paceline.store.place import Place, is_remote
from paceline.store.remote import finished_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRecord:
    """One finished stage: its folder (of a store in an object store, its URL) and what its manifest
    says."""

    folder: Path | str
    manifest: Manifest

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def result(self) -> dict[str, Any]:
        return self.manifest.result


@dataclass(frozen=True)
class RunRecord:
    """A run: its finished stages in the order of the work, the training log, seconds and size per
    stage, the plan that was made before it."""

    folder: Path
    stages: dict[str, StageRecord]
    log: TrainingLog
    seconds: dict[str, float]
    sizes: dict[str, FolderSize] = field(default_factory=dict)
    plan: dict[str, Any] | None = None

    def result(self, stage: str) -> dict[str, Any] | None:
        """What a stage reported; None where it is not part of the run."""
        return self.stages[stage].result if stage in self.stages else None


def gather(run_dir: Path) -> RunRecord:
    """Read a run's folder. Raises UsageError where it holds no finished stage, or two of a kind of
    which none is called as the stage."""
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such folder")
    of_stage: dict[str, list[StageRecord]] = {}
    for path in sorted(run_dir.glob(f"*/{MANIFEST_NAME}")):
        manifest = load_manifest(path.parent)
        if manifest.fingerprint is not None and manifest.stage != "report":
            of_stage.setdefault(manifest.stage, []).append(StageRecord(path.parent, manifest))
    found = {stage: _chosen(run_dir, stage, records) for stage, records in of_stage.items()}
    if not found:
        raise UsageError(f"{run_dir} holds no finished stage of paceline")
    sizes = {name: folder_size(Path(stage.folder)) for name, stage in found.items()}
    if "extract" not in found and (far := _far_store(found.get("train"))):
        found["extract"], sizes["extract"] = far
    stages = {name: found[name] for name in STAGES if name in found}
    sizes = {name: sizes[name] for name in stages}
    log = read_log(stages["train"].folder) if "train" in stages else TrainingLog([], [])
    plan = read_kept(run_dir / PLAN_FILE, "stages", "measured", "data")
    return RunRecord(run_dir, stages, log, _seconds(run_dir, stages), sizes, plan)


def _chosen(run_dir: Path, stage: str, records: list[StageRecord]) -> StageRecord:
    """A page is about one run: of several folders of a stage, the one that `run` gives it."""
    chosen = next((record for record in records if record.name == stage), records[0])
    others = [record.name for record in records if record is not chosen]
    if others and chosen.name != stage:
        raise UsageError(
            f"{run_dir} holds several folders of `{stage}`, {', '.join([chosen.name, *others])}, "
            f"and none is called {stage}: a page is about one run, so move the others"
        )
    if others:
        logger.info("the page is about %s; it leaves out %s", chosen.folder, ", ".join(others))
    return chosen


def _far_store(train: StageRecord | None) -> tuple[StageRecord, FolderSize] | None:
    """The store below a URL that the draft was trained on. The page goes without one that is not
    there any more, or is another by now."""
    entry = train.manifest.inputs.get("store") if train else None
    if entry is None or not is_remote(entry["path"]):
        return None
    url = entry["path"]
    try:
        manifest, files = finished_manifest(url), Place(url).files()
    except (StoreError, UsageError) as error:
        logger.warning("the page has no figures of the store: %s", error)
        return None
    if manifest.fingerprint != entry["fingerprint"]:
        logger.warning("the page has no figures of the store: %s is another by now", url)
        return None
    num_bytes = sum(file.num_bytes for file in files.values())
    return StageRecord(url, manifest), FolderSize(num_bytes, len(files))


def _seconds(run_dir: Path, stages: dict[str, StageRecord]) -> dict[str, float]:
    """As `paceline run` kept them; of stages that were run by hand nothing is known."""
    times = read_kept(run_dir / TIMES_FILE, "stages")
    known = times["stages"] if times else {}
    return {
        name: known[name]["seconds"]
        for name, record in stages.items()
        if known.get(name, {}).get("created") == record.manifest.created
    }
