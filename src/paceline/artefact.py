"""The life of an artefact folder: who owns it, what made it, whether it is finished.

Every stage writes one folder with a `manifest.json`. The manifest is written twice: when work
starts (status "running", with the inputs and options, so that a resumed run can be compared with
it) and when all is done (status "complete", with the result). What lies between is the stage's.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from paceline import fingerprint
from paceline.contracts import LOCK_NAME, MANIFEST_NAME, SCHEMA_VERSIONS, Overwrite
from paceline.errors import (
    DiskFullError,
    FingerprintMismatch,
    LockedError,
    StoreCorruption,
    StoreError,
    UsageError,
)

RUNNING = "running"
COMPLETE = "complete"
# What the manifest is called in a folder that is being emptied.
_EMPTIED_NAME = f".{MANIFEST_NAME}.tmp"
# `_aside` and `_before` of a folder that was to be replaced.
_LEFT_BY_A_KILL = re.compile(r"\.(.+?)(-before)?\.tmp")


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    inputs: for each input its path and its fingerprint (a string, or a dict of named parts so
    that a difference can be named). options: those that shape the result. result: the stage's own
    summary (of a running stage what it announced, if anything). fingerprint: identifies this
    folder's content as an input of later stages. checksum: of all other fields, so that a damaged
    manifest is found; one without it is taken as it is.
    """

    stage: str
    schema: int
    status: str
    inputs: dict[str, dict[str, Any]]
    options: dict[str, Any]
    versions: dict[str, str]
    created: str
    finished: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    checksum: str | None = None

    def of_content(self, content: str) -> str:
        """The fingerprint of a folder with these inputs and options and this content."""
        return fingerprint.of_json([self.stage, self.schema, self.inputs, self.options, content])


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is, at every instant, the old one or the new one, whole."""
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Write aside, fsync, rename, fsync the folder. Raises DiskFullError or StoreError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what a file system refuses into an error that names the file and says what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFullError(
                f"{path}: no space left ({error.strerror}). All that was published is kept: make "
                "room and run the same command again."
            ) from error
        raise StoreError(
            f"{path}: the file system refused ({error.strerror}). All that was published is "
            "kept: run the same command again."
        ) from error


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` at the end, whole and on the disk. After an
    error what was there before stays, and what was written goes. For folders that one process owns:
    two would write the same file. Raises DiskFullError or StoreError."""
    aside = _aside(path)
    try:
        with disk_errors(path):
            yield aside
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(aside, path)
            fsync_folder(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end, whole; missing parents are
    made. After an error what was there before stays, and what was written goes, so that a full disk
    has its room back; after a kill `mend_folder` does the same. What is in it is the caller's to
    fsync."""
    mend_folder(folder)
    aside, before = _aside(folder), _before(folder)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if folder.exists():
        os.replace(folder, before)
    os.replace(aside, folder)
    fsync_folder(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def mend_folder(folder: Path) -> None:
    """Clear up what a killed `replaced_folder` left beside a folder: the one before comes back
    unless the new one had taken its place. Nobody may be filling it meanwhile."""
    before = _before(folder)
    if before.exists() and not folder.exists():
        os.replace(before, folder)
    for left in (before, _aside(folder)):
        shutil.rmtree(left, ignore_errors=True)


def mend_folders(parent: Path) -> None:
    """`mend_folder` for all folders in `parent`, those too that only a kill's leavings tell of."""
    names = (_LEFT_BY_A_KILL.fullmatch(path.name) for path in parent.glob(".*.tmp"))
    for name in {found[1] for found in names if found}:
        mend_folder(parent / name)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _before(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-before.tmp")


@dataclass(frozen=True)
class FolderSize:
    """What a folder takes on the disk."""

    num_bytes: int
    num_files: int


def folder_size(folder: Path) -> FolderSize:
    """All files below a folder, however deep."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return FolderSize(sum(path.stat().st_size for path in files), len(files))


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_manifest(folder: str | Path, stage: str | None = None) -> Manifest:
    """Read an artefact folder's manifest.

    Raises UsageError where there is none, it is not a manifest, it is of another stage than
    `stage`, or of a schema version that this paceline does not read.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: no such folder")
        wanted = f"folder of `paceline {stage}`" if stage else "paceline folder"
        raise UsageError(f"{folder} is not a {wanted}: it has no {MANIFEST_NAME}")
    return parse_manifest(path.read_bytes(), path, stage)


def parse_manifest(text: bytes, path: str | Path, stage: str | None = None) -> Manifest:
    """The manifest that was read from `path`. Raises as load_manifest does."""
    try:
        manifest = Manifest(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a manifest that this paceline reads: {error}") from error
    if manifest.checksum not in (None, _checksum(manifest)):
        raise StoreCorruption(f"{path} does not match its checksum: it was damaged or edited")
    if stage and manifest.stage != stage:
        raise UsageError(f"{path} was made by `paceline {manifest.stage}`, not by `{stage}`")
    known = SCHEMA_VERSIONS.get(manifest.stage)
    if manifest.schema != known:
        raise UsageError(
            f"{path} has schema version {manifest.schema}; this paceline reads {known} of "
            f"`{manifest.stage}`. Use the paceline that made it, or make it anew."
        )
    return manifest


def load_finished(folder: str | Path, stage: str) -> Manifest:
    """Like load_manifest, and the folder must be complete."""
    manifest = load_manifest(folder, stage)
    require_finished(manifest, folder)
    return manifest


def require_finished(manifest: Manifest, folder: str | Path) -> None:
    """Raises UsageError for the manifest of a folder whose work is not complete."""
    if manifest.status != COMPLETE:
        raise UsageError(
            f"{folder} is not finished: run `paceline {manifest.stage}` with the same options to "
            "go on"
        )


class StageFolder:
    """An owned artefact folder. `done` is true when a finished run of the same work was found."""

    def __init__(self, path: Path, manifest: Manifest, resumed: bool) -> None:
        self.path = path
        self.manifest = manifest
        self.resumed = resumed

    @property
    def done(self) -> bool:
        return self.manifest.status == COMPLETE

    @property
    def result(self) -> dict[str, Any]:
        return self.manifest.result

    def announce(self, result: Mapping[str, Any]) -> None:
        """Say what the folder will hold, for those who read it before it is finished."""
        self.manifest = replace(self.manifest, result=_plain(result))
        _save(self.path, self.manifest)

    def reopen(self) -> None:
        """Take a finished folder up again that lacks something: until `finish` nobody takes it for
        complete."""
        self.manifest = replace(self.manifest, status=RUNNING, finished=None, fingerprint=None)
        _save(self.path, self.manifest)

    def finish(self, result: Mapping[str, Any], content: str) -> dict[str, Any]:
        """Commit the folder: `content` is the fingerprint of what was written. Returns result."""
        self.manifest = replace(
            self.manifest,
            status=COMPLETE,
            result=_plain(result),
            finished=_now(),
            fingerprint=self.manifest.of_content(content),
        )
        _save(self.path, self.manifest)
        return self.manifest.result


@contextmanager
def open_stage(
    path: str | Path,
    stage: str,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: Overwrite = False,
) -> Iterator[StageFolder]:
    """Own an artefact folder for the time of the `with` block.

    Work of the same inputs and options goes on, or is `done`; other work is refused with the
    differences named. `overwrite` starts over in place of a refusal, and, unless it is "other", in
    place of `done`; unfinished work goes on all the same, so that a command with it can be killed
    and given again. Work that fails before it wrote anything leaves the folder as it was. Raises
    LockedError while another process owns the folder, UsageError where another stage or not
    paceline made it, StoreError where its file system has no locks.
    """
    folder = Path(path)
    if "://" in str(path):
        raise UsageError(
            f"{path}: `{stage}` writes into a folder of this machine. Choose one; a store is then "
            "sent to a URL by `paceline upload-store`."
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: `{stage}` writes a folder. Choose another `out`.")
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        found = _found_work(folder, stage, inputs, options, overwrite)
        if found is not None:
            yield StageFolder(folder, found, resumed=True)
            return
        begun = Manifest(
            stage=stage,
            schema=SCHEMA_VERSIONS[stage],
            status=RUNNING,
            inputs=_plain(inputs),
            options=_plain(options),
            versions=fingerprint.package_versions(),
            created=_now(),
        )
        _save(folder, begun)
        try:
            yield StageFolder(folder, begun, resumed=False)
        except BaseException:
            _forget_unless_touched(folder)
            raise


def _forget_unless_touched(folder: Path) -> None:
    """Work that was refused before it wrote anything does not stand in the way of other work."""
    left = (path for path in folder.iterdir() if not _is_own_scrap(path))
    if [path.name for path in left] == [MANIFEST_NAME]:
        (folder / MANIFEST_NAME).unlink()
        fsync_folder(folder)


def work_to_keep(
    read: Callable[[], Manifest],
    where: str | Path,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: Overwrite,
) -> Manifest | None:
    """The manifest that read() finds `where`, if its work goes on or is done; None where it is to
    be started over (see open_stage).

    Raises FingerprintMismatch for other work unless `overwrite`. A manifest that cannot be read
    may be that of the work asked for, so what read() raises passes unless `overwrite` is True.
    """
    try:
        found = read()
    except (UsageError, StoreCorruption):
        if overwrite is not True:
            raise
        return None
    lines = differences(found.inputs, _plain(inputs)) + differences(found.options, _plain(options))
    if lines and not overwrite:
        raise FingerprintMismatch(
            f"{where} holds other work than what is asked for now:\n  " + "\n  ".join(lines),
            "Choose another folder, or pass overwrite (--overwrite) to start over.",
        )
    starts_over = lines or (overwrite is True and found.status == COMPLETE)
    return None if starts_over else found


def describe_input(path: str | Path, manifest: Manifest) -> dict[str, Any]:
    """An earlier stage's folder as an entry of `inputs`."""
    if manifest.fingerprint is None:
        raise UsageError(f"{path} is not finished: finish `paceline {manifest.stage}` first")
    return {"path": str(path), "fingerprint": manifest.fingerprint}


def describe_growing(path: str | Path, manifest: Manifest) -> dict[str, Any]:
    """An earlier stage's folder that may still be written as an entry of `inputs`: known by its
    beginning, since its content is not known yet."""
    made = [manifest.stage, manifest.schema, manifest.inputs, manifest.options, manifest.created]
    return {"path": str(path), "fingerprint": {"begun": fingerprint.of_json(made)}}


def refuse_own_inputs(folder: Path, inputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UsageError where a folder that would be emptied is, or holds, what its work reads."""
    inside = folder.resolve()
    for name, entry in inputs.items():
        given = entry.get("path") or []
        for path in map(Path, [given] if isinstance(given, str) else given):
            # What is not here, such as a Hub id or a URL, is no file of the folder's.
            if path.exists() and path.resolve().is_relative_to(inside):
                raise UsageError(
                    f"{folder} holds {path}, the input `{name}` of this work, which would be lost: "
                    "choose another `out`"
                )


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Leaf by leaf, where two nested mappings differ; paths of inputs do not count."""
    lines = []
    for key in sorted({*found, *wanted}):
        if key == "path":
            continue
        a, b = found.get(key), wanted.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [f"{key}.{line}" for line in differences(a, b)]
        elif a != b:
            lines.append(f"{key}: was {a!r}, now {b!r}")
    return lines


def _save(folder: Path, manifest: Manifest) -> None:
    sealed = replace(manifest, checksum=_checksum(manifest))
    write_json(folder / MANIFEST_NAME, asdict(sealed))


def _checksum(manifest: Manifest) -> str:
    return fingerprint.of_json(_plain(asdict(replace(manifest, checksum=None))))


def _found_work(
    folder: Path,
    stage: str,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: Overwrite,
) -> Manifest | None:
    """The work that goes on in a folder or is done; None where it is empty, or was emptied."""
    if (folder / MANIFEST_NAME).is_file():
        read = lambda: load_manifest(folder, stage)
        found = work_to_keep(read, folder, inputs, options, overwrite)
        if found is None:
            refuse_own_inputs(folder, inputs)
            _empty(folder, stage)
        return found
    if (folder / _EMPTIED_NAME).is_file():
        if not overwrite:
            raise FingerprintMismatch(
                f"{folder} was being emptied, to start over, when that was stopped.",
                "Choose another folder, or pass overwrite (--overwrite) to go on.",
            )
        _empty(folder, stage)
    elif strangers := [path.name for path in folder.iterdir() if not _is_own_scrap(path)]:
        raise UsageError(
            f"{folder} is not empty ({strangers[0]} ...) and has no {MANIFEST_NAME}: paceline did "
            "not make it. Choose another folder."
        )
    return None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """An advisory lock that the kernel drops when its process dies, however it dies."""
    with (folder / LOCK_NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(
                f"{folder} is in use by another run (pid {_owner(file)}): wait for it or stop it"
            ) from error
        except OSError as error:
            raise StoreError(
                f"{file.name} cannot be locked ({error.strerror}), and without a lock two runs "
                "could write here at once: choose a folder on a file system that has locks"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _owner(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip() or "unknown"


def _is_own_scrap(path: Path) -> bool:
    return path.name == LOCK_NAME or (path.name.startswith(".") and path.name.endswith(".tmp"))


def _empty(folder: Path, stage: str) -> None:
    """Remove what an earlier run of this stage left, where its manifest says that it is this
    stage's, whole or not.

    The manifest takes another name first, so that nobody takes what is left for an artefact, and
    goes last: after a kill it still says whose folder this is.
    """
    manifest, emptied = folder / MANIFEST_NAME, folder / _EMPTIED_NAME
    _refuse_foreign(manifest if manifest.is_file() else emptied, stage)
    if manifest.is_file():
        os.replace(manifest, emptied)
        fsync_folder(folder)
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (LOCK_NAME, _EMPTIED_NAME):
            entry.unlink()
    fsync_folder(folder)
    emptied.unlink()


def _refuse_foreign(manifest: Path, stage: str) -> None:
    """Raises UsageError for a manifest that is not of this stage. A wrong checksum or an old schema
    version does not matter: what such a folder holds is ours to remove."""
    try:
        found = json.loads(manifest.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("stage") != stage:
        raise UsageError(
            f"{manifest} is not of `paceline {stage}`, so its folder is not emptied. Choose "
            "another folder, or remove this one yourself."
        )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give it back: tuples become lists, so that found and wanted compare equal."""
    return json.loads(json.dumps(value))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
