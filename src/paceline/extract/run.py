"""The `extract` stage: plan, probe, capture, account for every sample, commit."""

import logging
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.artefact import StageFolder, describe_input
from paceline.contracts import Accounting, LayerPlan, TokenSample
from paceline.dataset import TokenDataset
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.errors import DataError, DiskFullError, EngineError, UsageError
from paceline.extract.engine import Engine, num_needed_tokens, open_engine
from paceline.extract.guards import Guards, unusable
from paceline.extract.order import capture_order, kept_bytes, least_budget, shard_bytes_of
from paceline.extract.quarantine import Quarantine
from paceline.extract.sink import FLAGS_PATTERN, QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.start import START_FILE, ensure_probed, read_start
from paceline.progress import progress_bar
from paceline.recipe import ExtractOptions
from paceline.side_files import describe_side_files
from paceline.store import StoreSpec, content_fingerprint, published_ids, stream_writer
from paceline.store.announced import announcement
from paceline.store.files import published_bytes
from paceline.store.place import is_remote
from paceline.store.sizes import store_size
from paceline.store.staging import open_store_stage
from paceline.target.layers import plan_layers
from paceline.target.spec import Target, open_target
from paceline.vllm_process import require_vllm

logger = logging.getLogger(__name__)

# Room left on the disk besides the store itself.
_SPARE_BYTES = 64 << 20


def run(options: ExtractOptions) -> dict[str, Any]:
    """Hidden states of a token data set into a store. Returns the manifest's result.

    Raises ProbeFailure before anything is stored, DiskFullError before the start where the result
    cannot fit, DataError where no sample can be used, EngineError where too many are bad.
    """
    if not options.data or not options.out:
        raise UsageError("extract: pass `data` (a folder of `prepare`) and `out`")
    if options.stream_bytes and is_remote(options.out):
        raise UsageError(
            "extract: `stream_bytes` needs an `out` that a training on this machine or in a shared "
            "folder can read meanwhile, not a URL"
        )
    data = TokenDataset(options.data)
    target = open_target(options, data.manifest.result["target"])
    # The data were rendered and tokenised for one target; states of another would be nonsense.
    target.check_made_by(
        data.manifest.inputs["target"]["fingerprint"],
        f"{data.folder} was prepared for",
        "Run `paceline prepare` with this target.",
    )
    plan = plan_layers(options.layers, target.num_layers, options.layer_convention)
    inputs = {
        "data": describe_input(options.data, data.manifest),
        "target": target.describe_input(),
    }
    identity = {**options.identity(), "layers": list(plan.aux)}
    with open_store_stage(
        options.out, options.staging, inputs, identity, options.overwrite
    ) as stage:
        if stage.done:
            return stage.result
        if options.engine == "vllm":
            require_vllm("extract")
        return _extract(options, stage, data, target, plan)


def _extract(
    options: ExtractOptions,
    stage: StageFolder,
    data: TokenDataset,
    target: Target,
    plan: LayerPlan,
) -> dict[str, Any]:
    native = target.native_dtype()
    dtype = read_start(stage.path).get("dtype") or dtype_name(
        choose_dtype(options.dtype, choose_device(options.device), native)
    )
    spec = StoreSpec(
        layers=plan,
        hidden_size=target.hidden_size,
        dtype=dtype,
        codec=options.codec,
        shard_bytes=shard_bytes_of(options),
    )
    samples, accounting = _usable_samples(data, target)
    published = frozenset(published_ids(stage.path))
    remaining = [s for s in samples if s.sample_id not in published]
    _check_disk(stage.path, remaining, spec, options.stream_bytes)
    announced = {
        "target": asdict(target.reference),
        "store": spec.to_dict(),
        "planned": announcement(samples),
        "chat_template_kwargs": data.manifest.result["chat_template_kwargs"],
    }
    stage.announce(announced)
    quarantine = Quarantine(stage.path, accounting.num_in, options.max_quarantined_share)
    kept = kept_bytes(spec, samples)
    least = least_budget(options, kept)
    with stream_writer(stage.path, spec, options.stream_bytes, kept, least):
        timing = None
        if remaining:
            timing = _run_engine(options, target, spec, samples, published, quarantine)
        told = {**announced, **read_start(stage.path), "timing": timing}
        return _finish(stage, accounting, quarantine, told)


def _usable_samples(data: TokenDataset, target: Target) -> tuple[list[TokenSample], Accounting]:
    """Raises DataError where there is none."""
    accounting = Accounting()
    usable, skipped = [], Counter()
    for sample in data:
        accounting.num_in += 1
        if reason := unusable(sample, target):
            skipped[reason] += 1
        else:
            usable.append(sample)
    if not usable:
        why = ", ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(f"{data.folder}: no sample of it can be used ({why or 'it has none'})")
    accounting.skipped = dict(skipped)
    return usable, accounting


def _check_disk(
    folder: Path, samples: list[TokenSample], spec: StoreSpec, stream_bytes: int | None
) -> None:
    needed = store_size(spec, samples).total + _SPARE_BYTES
    if stream_bytes is not None:
        needed = min(needed, stream_bytes - published_bytes(folder) + _SPARE_BYTES)
    free = shutil.disk_usage(folder).free
    if needed > free:
        bound = "at most" if spec.codec == "lossless" else "about"
        raise DiskFullError(
            f"{folder}: the store of {len(samples)} samples needs {bound} {needed / 1e9:.2f} GB "
            f"more (codec {spec.codec}), the disk has {free / 1e9:.2f} GB free. Nothing was "
            "started: make room, choose another folder or a smaller codec."
        )


def _run_engine(
    options: ExtractOptions,
    target: Target,
    spec: StoreSpec,
    samples: list[TokenSample],
    published: frozenset[str],
    quarantine: Quarantine,
) -> dict[str, float]:
    """Probe an engine and capture what is not published. Returns `start_s`, `capture_s` and how
    many `tokens` ran."""
    folder = quarantine.folder
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        opened = time.perf_counter()
        engine = open_engine(options, target, spec.dtype, Path(scratch))
        try:
            probe = ensure_probed(options, folder, engine, target, spec, samples)
            ranges = tuple(map(tuple, probe["rms_ranges"]))
            guards = Guards(spec.layers, target.hidden_size, ranges)
            captured = time.perf_counter()
            destination = Destination(folder, spec, guards, published)
            tokens = _capture(engine, samples, destination, quarantine)
            capture_s = time.perf_counter() - captured
        finally:
            engine.close()
    return {"start_s": captured - opened, "capture_s": capture_s, "tokens": tokens}


def _capture(
    engine: Engine,
    samples: list[TokenSample],
    destination: Destination,
    quarantine: Quarantine,
) -> int:
    """Returns how many tokens ran."""
    total = sum(map(num_needed_tokens, destination.missing(samples)))
    quarantine.forget()
    with progress_bar("extract", total, "tok") as bar:

        def on_tokens(count: int) -> None:
            bar.advance(count)
            quarantine.look()

        for group in capture_order(samples):
            engine.capture(group, destination.spec.layers, destination, on_tokens)
    return total


def _side_files(folder: Path) -> list[str]:
    """What lies beside the shards."""
    patterns = (START_FILE, QUARANTINE_PATTERN.format(worker="*"), FLAGS_PATTERN.format(worker="*"))
    return [path.name for pattern in patterns for path in folder.glob(pattern)]


def _finish(
    stage: StageFolder, accounting: Accounting, quarantine: Quarantine, told: dict[str, Any]
) -> dict[str, Any]:
    stored = published_ids(stage.path)
    bad = [e for e in quarantine.entries() if e["sample_id"] not in stored]
    accounting.num_done = len(stored)
    accounting.quarantined = dict(Counter(e["reason"] for e in bad))
    if not accounting.balanced:
        raise EngineError(
            f"{stage.path}: samples do not add up ({accounting.as_dict()}); run the same command "
            "again to capture what is missing"
        )
    quarantine.refuse(bad)
    result = {
        "accounting": accounting.as_dict(),
        "flagged": len(read_lines(stage.path, FLAGS_PATTERN)),
        **describe_side_files(stage.path, _side_files(stage.path)),
        **told,
    }
    return stage.finish(result, content=content_fingerprint(stage.path))
