"""`watch`: what a running job does, from the files that it leaves. Nothing is asked of the job."""

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline.artefact import COMPLETE, RUNNING, Manifest, load_manifest
from paceline.contracts import LOCK_NAME, MANIFEST_NAME
from paceline.errors import UsageError
from paceline.recipe import STAGES, WatchOptions
from paceline.runlog import acceptance_of, read_log, throughput
from paceline.store.budget import num_waiting
from paceline.store.files import receipt_numbers, receipt_path, shard_numbers, shard_path
from paceline.store.presence import READER, look
from paceline.store.shard import Shard
from paceline.verbs import make_callable

STOPPED = "stopped"
# Records and shards of which a throughput is the mean.
_NUM_RECENT = 20


def run(options: WatchOptions) -> dict[str, Any]:
    """Look once. Returns {"folder", "stages": [...], "is_running"}; a stage has `stage`, `folder`,
    `status` (complete, running or stopped) and for extract and train what they have done so far.

    Raises UsageError for a folder in which no stage has begun.
    """
    if not options.folder:
        raise UsageError("watch: name the folder of a run, or of one stage")
    about = {"once": options.once, "interval_s": options.interval_s}
    return {**snapshot(Path(options.folder)), **about}


def snapshot(folder: Path) -> dict[str, Any]:
    """See run."""
    found = []
    paths = [folder]
    if folder.is_dir() and not (folder / MANIFEST_NAME).is_file():
        paths = sorted(folder.glob("*/"))
    for path in paths:
        if (path / MANIFEST_NAME).is_file():
            manifest = load_manifest(path)
            found.append(_stage(path, manifest))
    if not found:
        raise UsageError(f"{folder} is no run of paceline, or no stage of it has begun")
    order = lambda stage: (*STAGES, stage["stage"]).index(stage["stage"])
    stages = sorted(found, key=order)
    is_running = any(stage["status"] == RUNNING for stage in stages)
    return {"folder": str(folder), "stages": stages, "is_running": is_running}


def _stage(folder: Path, manifest: Manifest) -> dict[str, Any]:
    status = manifest.status
    if status != COMPLETE and not _is_owned(folder):
        status = STOPPED
    about = {"stage": manifest.stage, "folder": str(folder), "status": status}
    details = _DETAILS.get(manifest.stage)
    return {**about, **details(folder, manifest)} if details else about


def _is_owned(folder: Path) -> bool:
    """A process holds the folder's lock."""
    try:
        with (folder / LOCK_NAME).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _extracted(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Samples and bytes so far; samples_per_s over the last shards, None before there are two."""
    shards = list(_looked_at(shard_path(folder, n) for n in shard_numbers(folder)))
    gone = list(_looked_at(receipt_path(folder, n) for n in receipt_numbers(folder)))
    planned = manifest.result.get("planned", {})
    reader = look(folder, READER)
    return {
        "samples": sum(seen.num_samples for seen in (*shards, *gone)),
        "planned_samples": sum(split["samples"] for split in planned.values()) or None,
        "bytes": sum(seen.num_bytes for seen in shards),
        "shards": len(shards),
        "shards_removed": len(gone),
        "samples_per_s": _rate([(seen.published_s, seen.num_samples) for seen in shards]),
        "waiting_for_room": num_waiting(folder),
        "reader": reader.state if reader else None,
    }


class _Look(NamedTuple):
    """What is seen of a shard, or of its receipt; published_s: when it was, since the epoch."""

    published_s: float
    num_bytes: int
    num_samples: int


def _looked_at(paths: Iterable[Path]) -> Iterator[_Look]:
    for path in paths:
        # One may be let go while we look.
        with suppress(FileNotFoundError):
            about = path.stat()
            num_samples = _num_samples(path, about.st_mtime_ns, about.st_size)
            yield _Look(about.st_mtime, about.st_size, num_samples)


@cache
def _num_samples(path: Path, _mtime_ns: int, _num_bytes: int) -> int:
    """Of a shard, which does not change once it is published: every look at a large store would
    open tens of thousands."""
    return Shard(path).num_samples


def _rate(published: list[tuple[float, int]]) -> float | None:
    recent = sorted(published)[-_NUM_RECENT:]
    seconds = recent[-1][0] - recent[0][0] if recent else 0.0
    return sum(count for _, count in recent[1:]) / seconds if seconds > 0 else None


def _trained(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Steps so far, throughput and share of waiting over the last records, the curves."""
    log = read_log(folder)
    known = {
        "steps": log.train[-1]["step"] + 1 if log.train else 0,
        "planned_steps": manifest.result.get("steps"),
        "loss": [record["loss"] for record in log.train],
        "acceptance_rate": [record["train"]["acceptance_rate"][0] for record in log.train],
        "heldout_loss": [r["heldout"]["loss"] for r in log.heldout if r["heldout"]],
        "heldout_acceptance_length": [acceptance_of(r["heldout"]) for r in log.heldout],
    }
    recent = log.train[-_NUM_RECENT:]
    if not recent:
        return known
    seconds = sum(record["step_s"] for record in recent)
    left = (known["planned_steps"] or known["steps"]) - known["steps"]
    return {
        **known,
        **throughput(recent),
        "seconds_left": left * seconds / len(recent),
        "learning_rate": recent[-1]["learning_rate"],
    }


_DETAILS = {"extract": _extracted, "train": _trained}

VERB = (WatchOptions, run)
make_callable(__name__)
