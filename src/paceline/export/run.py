"""The `export` stage: a draft in the forms that servers load, each proved before it is done."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import fingerprint
from paceline.artefact import (
    Manifest,
    describe_input,
    load_finished,
    open_stage,
    replaced_folder,
    write_atomically,
)
from paceline.device import dtype_name
from paceline.draft.model import Draft
from paceline.errors import ExportError, FingerprintMismatch, UsageError
from paceline.export.card import CARD_FILE, model_card
from paceline.export.serving import served_name, serving_command
from paceline.export.verify import EXPORTED_DTYPES, verify_exported
from paceline.forms.carry import FORMS, Carried, check_carried
from paceline.forms.compact import COMPACT_FILE, COMPACT_WEIGHTS_FILE, write_compact
from paceline.forms.config_json import Serving
from paceline.forms.load import CONFIG_FILE, WEIGHTS_FILE
from paceline.forms.source import DraftSource, open_draft
from paceline.forms.write import write_draft
from paceline.recipe import ExportOptions
from paceline.side_files import describe_side_files
from paceline.target.spec import Target, open_target

logger = logging.getLogger(__name__)

_COMPACT = "compact"


def run(options: ExportOptions) -> dict[str, Any]:
    """Write a draft for each server asked for, re-load it, replay it. Returns the manifest's
    result: for each form its folder, the lowest server release, the checks, the serving command.

    Raises ExportError before anything is written where a server cannot carry the draft, and where
    what was written does not replay (nothing has its final name then).
    """
    if not (options.draft and options.out):
        raise UsageError(
            "export: pass `draft` (a folder of `train`, or a server's checkpoint) and `out`"
        )
    source = open_draft(options.draft, options.draft_form)
    target = open_target(options, source.recorded_target)
    source.check_target(target)
    dtype = _dtype(options, target)
    draft = source.load(target, torch.float32)
    carried = {
        form: check_carried(
            FORMS[form], draft.config, target.num_layers, options.server_version.get(form)
        )
        for form in options.server
    }
    evaluated = _evaluated(options, source)
    inputs = {"draft": source.describe_input(), "target": target.describe_input()}
    if evaluated is not None:
        inputs["evaluate"] = describe_input(options.evaluate, evaluated)
    with open_stage(options.out, "export", inputs, options.identity(), options.overwrite) as stage:
        if stage.done:
            return _verified_again(stage.path, stage.result, target, draft, options)
        job = _Job(options, stage.path, target, draft, dtype, source.trained, evaluated)
        result = {
            "target": asdict(target.reference),
            "draft": {**draft.config.to_dict(), "aux_layers": list(draft.config.aux_layers)},
            "dtype": dtype_name(dtype),
            "forms": {form: _export(job, form, found) for form, found in carried.items()},
            "compact": _keep(job) if options.compact else None,
        }
        result |= describe_side_files(stage.path, _side_files(options))
        return stage.finish(result, content=content_of(stage.path, options.server))


@dataclass(frozen=True)
class _Job:
    options: ExportOptions
    folder: Path
    target: Target
    draft: Draft  # the trainer's, float32
    dtype: torch.dtype
    trained: Manifest | None
    evaluated: Manifest | None


def _keep(job: _Job) -> dict[str, Any]:
    evaluated = None if job.evaluated is None else job.evaluated.result
    return write_compact(job.folder / _COMPACT, job.draft, job.target, job.trained, evaluated)


def _export(job: _Job, form: str, carried: Carried) -> dict[str, Any]:
    """One form: written aside, verified there, then given its name."""
    # An unfinished run may have left this form already.
    final = job.folder / form
    with replaced_folder(final) as aside:
        serving = Serving(
            dtype=dtype_name(job.dtype),
            copies_embedding=job.options.copy_embedding,
            target_name=served_name(job.target),
            target_architectures=tuple(job.target.config.architectures or ()),
            num_speculative_tokens=job.options.num_speculative_tokens,
        )
        write_draft(aside, job.draft, form, job.target, serving)
        entry = {
            "folder": str(final),
            "server": FORMS[form].server,
            "lowest_version": carried.version,
            "needs": carried.needs,
            **verify_exported(aside, job.target, job.draft),
            "command": _command(job, final, form),
        }
        write_atomically(aside / CARD_FILE, _card(job, form, entry).encode())
    logger.info(
        "export: %s, for %s %s or newer; serve it with\n%s",
        final,
        entry["server"],
        carried.version,
        entry["command"],
    )
    return entry


def _command(job: _Job, folder: Path, form: str) -> str:
    return serving_command(job.target, folder, form, job.options.num_speculative_tokens)


def _card(job: _Job, form: str, entry: dict[str, Any]) -> str:
    # Folders move and are pushed elsewhere: the card's command runs inside its own.
    here = {**entry, "command": _command(job, Path("."), form)}
    return model_card(
        job.target.reference,
        job.draft.config,
        here,
        None if job.trained is None else asdict(job.trained),
        None if job.evaluated is None else job.evaluated.result,
    )


def _dtype(options: ExportOptions, target: Target) -> torch.dtype:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    dtype = target.native_dtype()
    if dtype not in EXPORTED_DTYPES:
        names = ", ".join(map(dtype_name, EXPORTED_DTYPES))
        raise ExportError(f"the target is of {dtype_name(dtype)}: give `dtype` as one of {names}")
    return dtype


def _evaluated(options: ExportOptions, source: DraftSource) -> Manifest | None:
    """The manifest of `evaluate`, which must have measured this very draft."""
    if not options.evaluate:
        return None
    manifest = load_finished(options.evaluate, "evaluate")
    if "draft" not in manifest.inputs:
        raise UsageError(
            f"{options.evaluate} measured a running server and was not told its draft: run it "
            "again with `draft`, or leave `evaluate` out"
        )
    measured = manifest.inputs["draft"]["fingerprint"]
    if measured != source.describe_input()["fingerprint"]:
        raise FingerprintMismatch(
            f"{options.evaluate} measured another draft than {source.folder}: run "
            "`paceline evaluate` on this one, or leave `evaluate` out"
        )
    return manifest


def _verified_again(
    folder: Path, result: dict[str, Any], target: Target, draft: Draft, options: ExportOptions
) -> dict[str, Any]:
    if options.verify:
        for form in result["forms"]:
            verify_exported(folder / form, target, draft)
            logger.info("export: %s replays the trained draft", folder / form)
    return result


def _side_files(options: ExportOptions) -> list[Path]:
    cards = [Path(form) / CARD_FILE for form in options.server]
    compact = [Path(_COMPACT) / name for name in (COMPACT_FILE, COMPACT_WEIGHTS_FILE)]
    return [*cards, *(compact if options.compact else [])]


def content_of(folder: Path, forms: list[str]) -> str:
    """The fingerprint of an exported folder's checkpoints."""
    names = (CONFIG_FILE, WEIGHTS_FILE)
    return fingerprint.of_json(
        {form: fingerprint.of_files(folder / form / name for name in names) for form in forms}
    )
