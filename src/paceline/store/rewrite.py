"""Puts new shards of a finished store in the place of old ones, whole or not at all.

The new shards are written aside in the folder; a plan that is written last is the decision. What
the plan says can be done any number of times, so a run that was killed is finished by the next.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.artefact import StageFolder, disk_errors, fsync_folder, write_json
from paceline.store import checksum
from paceline.store.files import (
    INDEX_NAME,
    REWRITE_FOLDER,
    REWRITE_PLAN_NAME,
    SHARDS_FOLDER,
    receipt_numbers,
    receipt_path,
    shard_numbers,
    shard_path,
)
from paceline.store.index import content_of
from paceline.store.shard import Shard
from paceline.store.spec import StoreSpec
from paceline.store.writer import ShardWriter


def finish_rewriting(stage: StageFolder) -> bool:
    """As the folder's owner: finish what an earlier run decided, drop what it did not. Returns
    whether there was a decision."""
    aside = stage.path / REWRITE_FOLDER
    plan_path = aside / REWRITE_PLAN_NAME
    is_decided = plan_path.is_file()
    if is_decided:
        _carry_out(stage, json.loads(plan_path.read_text()))
    shutil.rmtree(aside, ignore_errors=True)
    return is_decided


def rewrite_shards(
    stage: StageFolder,
    spec: StoreSpec,
    old: Sequence[int],
    write: Callable[[ShardWriter], None],
    result: Mapping[str, Any],
) -> None:
    """Replace shards `old` by what `write` adds to a writer, and the manifest's result by `result`.

    Other shards are not touched. Call finish_rewriting first.
    """
    aside = stage.path / REWRITE_FOLDER
    with disk_errors(aside):
        aside.mkdir()
    with ShardWriter(aside, spec) as writer:
        write(writer)
    taken = [*shard_numbers(stage.path), *receipt_numbers(stage.path)]
    first = max(taken, default=-1) + 1
    plan = {
        "remove": list(old),
        "add": [[n, first + i] for i, n in enumerate(shard_numbers(aside))],
        "result": dict(result),
        "content": _content_after(stage.path, aside, spec, set(old)),
    }
    write_json(aside / REWRITE_PLAN_NAME, plan)
    finish_rewriting(stage)


def _content_after(folder: Path, aside: Path, spec: StoreSpec, old: set[int]) -> str:
    kept = [shard_path(folder, n) for n in shard_numbers(folder) if n not in old]
    new = [shard_path(aside, n) for n in shard_numbers(aside)]
    return content_of_files(folder, spec, [*kept, *new])


def content_of_files(folder: Path, spec: StoreSpec, shards: Sequence[Path]) -> str:
    """The fingerprint of a store that holds these shards and, of those that were let go, the
    receipts of `folder`: by checksums alone, whatever form the shards are of."""
    receipts = [receipt_path(folder, n) for n in receipt_numbers(folder)]
    found = [Shard(p).tensor("sample_checksums").numpy().copy() for p in [*shards, *receipts]]
    checksums = np.concatenate([np.empty((0, checksum.DIGEST_BYTES), np.uint8), *found])
    return content_of(spec if shards else None, checksums)


def _carry_out(stage: StageFolder, plan: Mapping[str, Any]) -> None:
    folder, aside = stage.path, stage.path / REWRITE_FOLDER
    with disk_errors(folder / SHARDS_FOLDER):
        for staged, number in plan["add"]:
            if shard_path(aside, staged).exists():
                os.rename(shard_path(aside, staged), shard_path(folder, number))
        # The new names must last before the old ones go.
        fsync_folder(folder / SHARDS_FOLDER)
        for number in plan["remove"]:
            shard_path(folder, number).unlink(missing_ok=True)
        fsync_folder(folder / SHARDS_FOLDER)
        (folder / INDEX_NAME).unlink(missing_ok=True)
    stage.finish(plan["result"], plan["content"])
