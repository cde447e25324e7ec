"""`upgrade-store`: a store that an earlier paceline wrote, brought up to date in its place.

What earlier ones did otherwise: shards without the column `finished` (before there were codecs),
manifests without a checksum, an index that did not say which store it is of. States, tokens and
masks are the same bytes throughout.
"""

import logging
from pathlib import Path
from typing import Any

from paceline.artefact import StageFolder, load_finished, open_stage
from paceline.errors import StoreCorruption, UsageError
from paceline.recipe import UpgradeStoreOptions
from paceline.store import ShardWriter, Store, StoreSpec
from paceline.store.codecs import codec_of
from paceline.store.encoded import read_encoded
from paceline.store.files import shard_numbers, shard_path
from paceline.store.rewrite import content_of_files, finish_rewriting, rewrite_shards
from paceline.store.shard import Shard
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)


def run(options: UpgradeStoreOptions) -> dict[str, Any]:
    """Upgrade a finished store. Returns `shards_rewritten`, `manifest_sealed` (it had no checksum)
    and the manifest's result.

    Raises StoreCorruption, before anything is changed, for a store that is not whole.
    """
    if not options.store:
        raise UsageError("upgrade-store: name a store")
    folder = Path(options.store)
    found = load_finished(folder, "extract")
    with open_stage(folder, "extract", found.inputs, found.options) as stage:
        finish_rewriting(stage)
        content = _checked_content(stage)
        old = [n for n in shard_numbers(folder) if _is_early(Shard(shard_path(folder, n)))]
        if old:
            spec = StoreSpec.from_dict(stage.result["store"])
            write = lambda writer: _write_again(writer, folder, old)
            rewrite_shards(stage, spec, old, write, stage.result)
        elif found.checksum is None:
            stage.finish(stage.result, content)
        result = stage.result
    # Opening it makes the index again, where that is of an early form.
    Store(folder)
    logger.info("upgrade-store: %d shards rewritten", len(old))
    return {
        "store": result["store"],
        "shards_rewritten": len(old),
        "manifest_sealed": found.checksum is None,
    }


def _checked_content(stage: StageFolder) -> str:
    """The fingerprint of what is there; it must be what the manifest says."""
    folder = stage.path
    shards = [shard_path(folder, n) for n in shard_numbers(folder)]
    content = content_of_files(folder, StoreSpec.from_dict(stage.result["store"]), shards)
    if stage.manifest.of_content(content) != stage.manifest.fingerprint:
        raise StoreCorruption(f"{folder} does not hold what its manifest says: not upgraded")
    return content


def _is_early(shard: Shard) -> bool:
    return "finished" not in shard.stored_columns()


def _write_again(writer: ShardWriter, folder: Path, numbers: list[int]) -> None:
    codec = codec_of(writer.spec)
    for number in numbers:
        shard = Shard(shard_path(folder, number))
        # Its samples get new checksums, since these cover `finished`: they must be whole now.
        shard.verify()
        columns = {**shard.stored_columns(), "finished": [None] * shard.num_samples}
        for position in range(shard.num_samples):
            writer.add_encoded(read_encoded(shard, codec, position, columns))


VERB = (UpgradeStoreOptions, run)
make_callable(__name__)
