"""`inspect`: what an artefact folder holds, and with `verify` whether it is what was written.

Reads any stage's folder, finished or not. A decoded sample says which tokens are supervised.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from paceline import fingerprint
from paceline.artefact import COMPLETE, Manifest, load_finished, load_manifest
from paceline.contracts import MANIFEST_NAME, TokenSample
from paceline.dataset import list_parts, read_part
from paceline.errors import StoreCorruption, TargetError, UsageError
from paceline.exchange.export_store import content_of as content_of_files
from paceline.export.run import content_of as content_of_export
from paceline.prepare.generate import list_answer_parts
from paceline.prepare.summary import add_up
from paceline.progress import progress_bar
from paceline.recipe import InspectOptions, TargetOptions
from paceline.runlog import read_log
from paceline.side_files import check_side_files
from paceline.store import Store
from paceline.store.cache import Cache
from paceline.store.place import Place, is_remote
from paceline.target.spec import Target, open_target
from paceline.verbs import make_callable
from paceline.vocab import load_vocabulary

_NUM_VOCABULARY_TOKENS = 32


def run(options: InspectOptions) -> dict[str, Any]:
    """Look into a folder. Returns the manifest's fields, `files`, `verified` (None unless asked)
    and what the stage adds: `sample`, `vocabulary`, `curve`, `tensors`.

    Raises UsageError for a folder that is not paceline's, StoreCorruption where `verify` finds
    other bytes than were written.
    """
    if not options.folder:
        raise UsageError("inspect: name a folder that a stage wrote")
    if is_remote(options.folder):
        return _look_far(options)
    folder = Path(options.folder)
    manifest = _manifest(folder)
    files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")]
    look = _DETAILS.get(manifest.stage)
    return {
        "folder": str(folder),
        **asdict(manifest),
        "files": {"count": len(files), "bytes": sum(p.stat().st_size for p in files)},
        "verified": verify(folder, manifest) if options.verify else None,
        **(look(folder, manifest, options.sample) if look else {}),
    }


def _look_far(options: InspectOptions) -> dict[str, Any]:
    """A store below a URL."""
    place = Place(options.folder)
    store = Store(place.url, cache=Cache(options.cache_dir, options.cache_bytes))
    sizes = [file.num_bytes for file in place.files().values()]
    if options.verify:
        _verify_store(store)
    return {
        "folder": place.url,
        **asdict(store.manifest),
        "files": {"count": len(sizes), "bytes": sum(sizes)},
        "verified": {"fingerprint": store.manifest.fingerprint} if options.verify else None,
        "sample": _sample_of(store, options.sample),
    }


def verify(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read a finished folder and compare it with its fingerprint. Returns {"fingerprint"}.

    Raises StoreCorruption where they differ, UsageError for a folder that is not finished.
    """
    load_finished(folder, manifest.stage)
    try:
        content = _CONTENT[manifest.stage](folder, manifest)
    except (OSError, ValueError) as error:
        raise StoreCorruption(f"{folder} cannot be read: {error}") from error
    check_side_files(folder, manifest)
    if content is not None and manifest.of_content(content) != manifest.fingerprint:
        raise StoreCorruption(
            f"{folder} holds other content than its manifest says: it was changed after "
            f"`paceline {manifest.stage}` finished. Make it again with --overwrite."
        )
    return {"fingerprint": manifest.fingerprint}


def _manifest(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}"
        )
    stages = sorted(p.parent.name for p in folder.glob(f"*/{MANIFEST_NAME}"))
    if stages and not (folder / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{folder} is a run, not a stage's folder: inspect one of {', '.join(stages)} inside it"
        )
    return load_manifest(folder)


def _store_content(folder: Path, _: Manifest) -> None:
    # A store knows its own bytes tensor by tensor, and says which one is damaged.
    _verify_store(Store(folder))


def _verify_store(store: Store) -> None:
    # All bytes of what may be terabytes are read.
    with progress_bar("verify", sum(store.shelf.shard_bytes().values()), "B") as bar:
        store.verify(bar.advance)


def _align_content(folder: Path, _: Manifest) -> str:
    return load_vocabulary(folder).content()


def _result_content(folder: Path, _: Manifest) -> str:
    return fingerprint.of_json(json.loads((folder / "result.json").read_text()))


# For each stage the fingerprint of its content, made again from the files; the stage's side files
# are looked at apart.
_CONTENT: dict[str, Callable[[Path, Manifest], str | None]] = {
    "prepare": lambda folder, manifest: add_up(folder, manifest.result["vocab_size"]).content,
    "generate": lambda folder, _: fingerprint.of_files(list_answer_parts(folder)),
    "extract": _store_content,
    "align": _align_content,
    "train": lambda folder, _: fingerprint.of_file(folder / "draft.safetensors"),
    "evaluate": _result_content,
    "codec-report": _result_content,
    "export": lambda folder, manifest: content_of_export(folder, manifest.options["server"]),
    "report": lambda folder, manifest: fingerprint.of_file(folder / manifest.result["page_file"]),
    "export-store": lambda folder, _: content_of_files(folder),
}


def _prepared(folder: Path, manifest: Manifest, sample_id: str | None) -> dict[str, Any]:
    samples = itertools.chain.from_iterable(map(read_part, list_parts(folder)))
    return {"sample": _decoded(manifest, _chosen(samples, sample_id, folder))}


def _stored(folder: Path, _: Manifest, sample_id: str | None) -> dict[str, Any]:
    return {"sample": _sample_of(Store(folder, unfinished=True), sample_id)}


def _sample_of(store: Store, sample_id: str | None) -> dict[str, Any] | None:
    try:
        index = 0 if sample_id is None else store.records.find(sample_id)
    except KeyError:
        raise _no_sample(store.folder, sample_id) from None
    if not len(store):
        return None
    stored = store.read(index)
    record = stored.record
    sample = TokenSample(
        sample_id=record.sample_id,
        input_ids=stored.input_ids.numpy(),
        loss_mask=stored.loss_mask.numpy(),
        source=record.source,
        split=record.split,
        num_past_end=record.num_past_end,
    )
    return _decoded(store.manifest, sample)


def _generated(folder: Path, _: Manifest, sample_id: str | None) -> dict[str, Any]:
    for part in list_answer_parts(folder):
        with part.open("rb") as file:
            for row in map(json.loads, file):
                if sample_id in (None, row["id"]):
                    pieces = [
                        {"text": f"{m['role']}: {m['content']}\n", "kind": _kind_of_role(m["role"])}
                        for m in row["messages"]
                    ]
                    about = {"sample_id": row["id"], "source": row["source"], "split": None}
                    return {"sample": {**about, "pieces": pieces, "note": None}}
    if sample_id is not None:
        raise _no_sample(folder, sample_id)
    return {"sample": None}


def _vocabulary(folder: Path, manifest: Manifest, _: str | None) -> dict[str, Any]:
    if manifest.status != COMPLETE:
        return {"vocabulary": None}
    selected = load_vocabulary(folder).selected[:_NUM_VOCABULARY_TOKENS].tolist()
    target, note = _target(manifest.result["target"])
    texts = [target.tokenizer.decode([i]) if target else None for i in selected]
    pairs = [{"id": i, "text": text} for i, text in zip(selected, texts, strict=True)]
    return {"vocabulary": {"lowest": pairs, "note": note}}


def _trained(folder: Path, _manifest: Manifest, _: str | None) -> dict[str, Any]:
    curve = [{"step": r["step"], "loss": r["loss"]} for r in read_log(folder).train]
    return {"curve": curve, "tensors": list(_tensors(folder))}


def _exported(folder: Path, _manifest: Manifest, _: str | None) -> dict[str, Any]:
    return {"tensors": list(_tensors(folder))}


_DETAILS: dict[str, Callable[[Path, Manifest, str | None], dict[str, Any]]] = {
    "prepare": _prepared,
    "generate": _generated,
    "extract": _stored,
    "align": _vocabulary,
    "train": _trained,
    "export": _exported,
}


def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Name, shape and dtype of every tensor of every safetensors file; no data is read."""
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    yield {
                        "file": str(path.relative_to(folder)),
                        "name": name,
                        "shape": part.get_shape(),
                        "dtype": part.get_dtype(),
                    }
        except SafetensorError as error:
            raise StoreCorruption(f"{path} is not a safetensors file: {error}") from error


def _chosen(
    samples: Iterator[TokenSample], sample_id: str | None, folder: Path
) -> TokenSample | None:
    found = next((s for s in samples if sample_id in (None, s.sample_id)), None)
    if found is None and sample_id is not None:
        raise _no_sample(folder, sample_id)
    return found


def _no_sample(folder: Path | str, sample_id: str | None) -> UsageError:
    return UsageError(f"{folder} has no sample {sample_id!r}")


def _decoded(manifest: Manifest, sample: TokenSample | None) -> dict[str, Any] | None:
    """The sample's text in pieces: `context`, `supervised`, `past_end`."""
    if sample is None:
        return None
    target, note = _target(manifest.result.get("target") or _recorded_by_input(manifest))
    pieces = []
    if target:
        kinds = np.where(sample.loss_mask, "supervised", "context").astype(object)
        kinds[sample.num_tokens - sample.num_past_end :] = "past_end"
        for kind, group in itertools.groupby(range(sample.num_tokens), key=lambda i: kinds[i]):
            text = target.tokenizer.decode(sample.input_ids[list(group)].tolist())
            pieces.append({"text": text, "kind": str(kind)})
    return {
        "sample_id": sample.sample_id,
        "source": sample.source,
        "split": sample.split,
        "num_tokens": sample.num_tokens,
        "num_supervised": sample.num_supervised,
        "pieces": pieces,
        "note": note,
    }


def _recorded_by_input(manifest: Manifest) -> dict[str, Any] | None:
    """What an unfinished folder knows of its target: the path among its inputs."""
    found = manifest.inputs.get("target")
    return {"target": found["path"]} if found and "path" in found else None


def _target(recorded: dict[str, Any] | None) -> tuple[Target | None, str | None]:
    """The target for its tokenizer; or why it is not there: a folder can outlive its target."""
    if recorded is None:
        return None, "not decoded: the folder does not name its target"
    try:
        target = open_target(TargetOptions(), recorded)
        _ = target.tokenizer
    except TargetError as error:
        return None, f"not decoded: {error}"
    return target, None


def _kind_of_role(role: str) -> str:
    return "supervised" if role == "assistant" else "context"


VERB = (InspectOptions, run)
make_callable(__name__)
