"""Result files that a stage's content fingerprint does not cover: their own fingerprints stand in
the manifest's result, under `side_files`, sealed by the manifest's checksum."""

from collections.abc import Iterable
from pathlib import Path

from paceline import fingerprint
from paceline.artefact import Manifest, differences
from paceline.errors import StoreCorruption

SIDE_FILES = "side_files"


def describe_side_files(folder: Path, paths: Iterable[Path | str]) -> dict[str, dict[str, str]]:
    """{SIDE_FILES: {path: fingerprint}} for a stage's result; paths are relative to the folder, and
    those of which there is no file are left out."""
    there = [path for path in map(str, paths) if (folder / path).is_file()]
    return {SIDE_FILES: {path: fingerprint.of_file(folder / path) for path in sorted(there)}}


def check_side_files(folder: Path, manifest: Manifest, only: str | None = None) -> None:
    """Raises StoreCorruption that names the files (or the one of `only`) which are not what the
    stage wrote. Manifests of earlier versions name none."""
    expected: dict[str, str] = manifest.result.get(SIDE_FILES, {})
    if only is not None:
        expected = {path: value for path, value in expected.items() if path == only}
    found = describe_side_files(folder, expected)[SIDE_FILES]
    if lines := differences(expected, found):
        raise StoreCorruption(
            f"{folder}: files are not what they were when `paceline {manifest.stage}` finished: "
            f"{'; '.join(lines)}. Make it again with --overwrite."
        )
