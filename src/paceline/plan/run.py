"""The verb `plan`: each stage's bytes, files, seconds and memory, and the arithmetic of each."""

import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.ahead import shape_of_draft
from paceline.artefact import write_json
from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT, LayerPlan
from paceline.device import (
    choose_device,
    choose_dtype,
    dtype_name,
    product_flops,
    training_dtype,
)
from paceline.errors import TargetError, UsageError
from paceline.plan.data import DataSample, sample_data
from paceline.plan.measure import measure, measure_answers
from paceline.plan.memory import Memory, extract_memory, process_memory, train_memory
from paceline.plan.shape import TargetShape, shape_of
from paceline.plan.sizes import (
    DraftShape,
    Footprint,
    align_footprint,
    draft_shape,
    export_footprint,
    extract_footprint,
    generate_footprint,
    page_footprint,
    prepare_footprint,
    result_footprint,
    store_spec,
    train_footprint,
)
from paceline.plan.times import (
    Duration,
    Measured,
    evaluate_time,
    extract_share,
    extract_time,
    generate_time,
    prepare_time,
    train_steps,
    train_time,
)
from paceline.recipe import PlanOptions, Recipe
from paceline.stages import PLAN_FILE, plan_stages, recipe_of
from paceline.target.spec import Target, TargetReference

logger = logging.getLogger(__name__)

_SHORT = Duration(0.0, "seconds: not counted")


def run(options: PlanOptions) -> dict[str, Any]:
    """Plan a recipe and keep the plan in a file. Returns what the file holds; docs/plan.md.

    Raises UsageError where data are missing and none are assumed, TargetError where the config or
    (for a data sample) the tokenizer is missing, and what later stages raise where no such draft
    can be made or served.
    """
    recipe = recipe_of(options)
    planned = plan_stages(recipe)
    target = _target(options, recipe)
    shape = shape_of(target)
    answers = _answers(options, recipe, target)
    data = sample_data(options, recipe, target, shape.vocab_size, answers.get("answer_tokens"))
    measured = None
    if options.measure:
        measured = Measured(**{**asdict(measure(options, planned, data)), **answers})
    setting = _setting(options, recipe, shape)
    layers, config = shape_of_draft(recipe, planned, target, shape.text_config, shape.num_layers)
    draft = draft_shape(config, recipe.train.train_head)
    told = _stages(_Work(options, recipe, shape, layers, draft, data, measured, setting))
    stages = {name: told[name] for name in planned}
    out = Path(options.out or Path(recipe.run_dir) / PLAN_FILE)
    result = {
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
        "run_dir": recipe.run_dir,
        "target": _told_of_target(recipe, shape),
        "data": _told_of_data(data),
        "setting": asdict(setting),
        "measured": asdict(measured) if measured else None,
        "stages": stages,
        "total": _total(options, stages),
        "disk": _disk(Path(recipe.run_dir), stages),
        "file": str(out),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    return result


def _target(options: PlanOptions, recipe: Recipe) -> Target:
    reference = TargetReference(recipe.target, recipe.revision, recipe.trust_remote_code)
    try:
        return Target(reference, with_weights=options.measure)
    except TargetError as error:
        raise TargetError(
            f"{error}\nA folder with the target's config.json alone is enough to plan: pass it as "
            "`target=FOLDER` (with its tokenizer's files, data are tokenised; else add --rows)"
        ) from error


@dataclass(frozen=True)
class Setting:
    """What the stages run on. flops: of one device, by dtype of extraction and of training."""

    device: str
    extract_dtype: str
    train_dtype: str
    extract_flops: float
    train_flops: float


@dataclass(frozen=True)
class _Work:
    options: PlanOptions
    recipe: Recipe
    shape: TargetShape
    layers: LayerPlan
    draft: DraftShape
    data: DataSample
    measured: Measured | None
    setting: Setting


def _answers(options: PlanOptions, recipe: Recipe, target: Target) -> dict[str, float]:
    """What is known of the answers that `generate` will write."""
    told = {"answer_tokens": float(options.answer_tokens)} if options.answer_tokens else {}
    if options.measure and recipe.generate and options.rows is None:
        return {**measure_answers(recipe.generate, target), **told}
    return told


def _setting(options: PlanOptions, recipe: Recipe, shape: TargetShape) -> Setting:
    device = choose_device("auto").type if options.device == "auto" else options.device
    native = getattr(torch, shape.dtype, torch.float32)
    extract_dtype = dtype_name(choose_dtype(recipe.extract.dtype, torch.device(device), native))
    train_dtype = dtype_name(training_dtype(recipe.train.dtype, torch.device(device)))
    if options.flops is None and device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "plan: no GPU is here to time: pass `flops`, a GPU's rate of large matrix products in "
            "FLOP per second (an H200 reaches 7e14 in bfloat16, an H100 6e14, an A100 2.5e14)"
        )
    flops = {
        dtype: options.flops or product_flops(torch.device(device), getattr(torch, dtype))
        for dtype in {extract_dtype, train_dtype}
    }
    return Setting(device, extract_dtype, train_dtype, flops[extract_dtype], flops[train_dtype])


def _stages(work: _Work) -> dict[str, dict[str, Any]]:
    recipe, data, shape, setting = work.recipe, work.data, work.shape, work.setting
    draft, on_gpu = work.draft, setting.device == "cuda"
    spec = store_spec(recipe.extract, shape, work.layers, setting.extract_dtype)
    share = work.measured.states_share if work.measured else None
    stored, size = extract_footprint(recipe.extract, spec, data, share)
    steps = train_steps(recipe.train, data)
    training = train_time(
        work.options, recipe.train, data, draft, setting.train_flops, work.measured
    )
    evaluating = evaluate_time(recipe.evaluate, recipe.train, data, training.seconds, steps)
    reached = extract_share(recipe.extract.engine, on_gpu)
    extracting = extract_time(
        work.options, data, shape, setting.extract_flops, reached, work.measured
    )
    extract_needs = extract_memory(recipe.extract, shape, spec, size, on_gpu)
    train_needs = train_memory(recipe.train, shape, draft, data, spec, setting.train_dtype, on_gpu)
    export_dtype = shape.dtype if recipe.export.dtype == "auto" else recipe.export.dtype
    little = process_memory()
    told = {
        "prepare": _entry(
            prepare_footprint(data, shape), prepare_time(data, work.measured), little
        ),
        "extract": _entry(stored, extracting, extract_needs),
        "align": _entry(align_footprint(recipe, shape), _SHORT, little),
        "train": _entry(train_footprint(recipe.train, draft, steps), training, train_needs),
        "evaluate": _entry(result_footprint(), evaluating, little),
        "export": _entry(export_footprint(recipe.export, draft, export_dtype), _SHORT, little),
        "report": _entry(page_footprint(), _SHORT, little),
    }
    if recipe.generate is None:
        return told
    answer_tokens = data.answer_tokens or recipe.generate.max_new_tokens
    writing = generate_time(
        work.options, data, shape, setting.extract_flops, answer_tokens, work.measured
    )
    return {"generate": _entry(generate_footprint(data), writing, extract_needs), **told}


def _entry(size: Footprint, duration: Duration, memory: Memory) -> dict[str, Any]:
    return {
        "bytes": size.bytes,
        "peak_bytes": size.peak_bytes,
        "files": size.files,
        "seconds": duration.seconds,
        "host_bytes": memory.host_bytes,
        "device_bytes": memory.device_bytes,
        "memory": asdict(memory),
        "how": {"bytes": size.how, "seconds": duration.how},
    }


def _total(options: PlanOptions, stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    known = [s["seconds"] for s in stages.values() if s["seconds"] is not None]
    seconds = sum(known)
    price = options.price_per_hour
    return {
        "bytes": sum(s["bytes"] for s in stages.values()),
        "files": sum(s["files"] for s in stages.values()),
        "seconds": seconds,
        "not_foretold": [name for name, s in stages.items() if s["seconds"] is None],
        "host_bytes": max(s["host_bytes"] for s in stages.values()),
        "device_bytes": max(s["device_bytes"] for s in stages.values()),
        "devices": options.devices,
        "cost": None if price is None else seconds / 3600 * price * options.devices,
    }


def _disk(folder: Path, stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """At the worst moment all earlier folders stand beside the one in work."""
    needed = before = 0
    for stage in stages.values():
        needed = max(needed, before + stage["peak_bytes"])
        before += stage["bytes"]
    there = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
    free = shutil.disk_usage(there).free
    return {"folder": str(there), "needed": needed, "free": free, "fits": needed <= free}


def _told_of_target(recipe: Recipe, shape: TargetShape) -> dict[str, Any]:
    return {
        "target": recipe.target,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "weights": shape.num_weights,
        "active_weights": shape.active_weights,
        "weight_bytes": shape.weight_bytes,
        "dtype": shape.dtype,
    }


def _told_of_data(data: DataSample) -> dict[str, Any]:
    return {
        "origin": data.origin,
        "rows": data.rows,
        "samples": data.num_samples,
        "tokens": data.num_tokens,
        "supervised_tokens": data.num_supervised,
        "train_supervised_tokens": data.num_supervised_in(TRAIN_SPLIT),
        "heldout_supervised_tokens": data.num_supervised_in(HELDOUT_SPLIT),
        "mean_context": data.mean_context,
        "answer_tokens": data.answer_tokens,
    }
