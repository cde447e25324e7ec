"""The `evaluate` stage: acceptance length of a draft, server-free, in real decoding or served."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.acceptance.counts import definition
from paceline.artefact import (
    describe_input,
    load_finished,
    open_stage,
    write_atomically,
    write_json,
)
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.errors import UsageError
from paceline.evaluate.decode import check_decodable
from paceline.evaluate.decoding import measure_decode
from paceline.evaluate.prompts import describe_questions
from paceline.evaluate.served import measure_served
from paceline.evaluate.server_free import measure_chain
from paceline.evaluate.speedup import predict
from paceline.evaluate.walks import Measured
from paceline.forms.source import DraftSource, open_draft
from paceline.recipe import EvaluateOptions
from paceline.side_files import describe_side_files
from paceline.store.remote import finished_manifest
from paceline.target.spec import Target, open_target

RESULT_FILE, CONVERSATIONS_FILE, ANSWERS_FILE = (
    "result.json",
    "conversations.jsonl",
    "answers.jsonl",
)


def run(options: EvaluateOptions) -> dict[str, Any]:
    """Measure a draft. Returns what `result.json` holds.

    Raises EvaluationError where nothing can be measured or transformers cannot decode the target,
    FingerprintMismatch for a store or data of another target or other layers.
    """
    _check(options)
    drafted_by = open_draft(options.draft, options.draft_form) if options.draft else None
    target = open_target(options, _recorded_target(options, drafted_by))
    # Before anything is measured, which a late failure would lose.
    check_decodable(options, target)
    if drafted_by is not None:
        drafted_by.check_target(target)
    inputs = {
        "answers": _describe_answers(options, target),
        "target": target.describe_input(),
    }
    if drafted_by is not None:
        inputs["draft"] = drafted_by.describe_input()
    beside = open_draft(options.beside) if options.beside else None
    if beside is not None:
        beside.check_target(target)
        inputs["beside"] = beside.describe_input()
    if options.server:
        servers = {"with_draft": options.server, "plain": options.plain_server}
        inputs["server"] = {"path": options.server, "fingerprint": servers}
    with open_stage(
        options.out, "evaluate", inputs, options.identity(), options.overwrite
    ) as stage:
        if stage.done:
            return stage.result
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device, target.native_dtype())
        if options.mode == "served":
            measured = measure_served(options, drafted_by, target, dtype)
        else:
            draft = drafted_by.load(target, dtype).to(device)
            if options.mode == "chain":
                other = None if beside is None else beside.load(target, dtype).to(device)
                measured = measure_chain(options, draft, target, other)
            else:
                measured = measure_decode(options, draft, target)
        result = {
            "definition": definition([int(k) for k in measured.result["results"]]),
            "mode": options.mode,
            "dtype": dtype_name(dtype),
            "split": None if options.prompts else options.split,
            "temperature": options.temperature,
            "target": asdict(target.reference),
            **measured.result,
        }
        if options.speedup.predict:
            draft = drafted_by.load(target, dtype).to(device)
            result["speedup"] = predict(options.speedup, draft, target, result["results"])
        result |= _write_rows(stage.path, measured)
        write_json(stage.path / RESULT_FILE, result)
        return stage.finish(result, content=fingerprint.of_json(result))


def _check(options: EvaluateOptions) -> None:
    if not options.out or not (options.draft or options.server):
        raise UsageError(
            "evaluate: pass `draft` (a folder of `train`, or a server's checkpoint) and `out`"
        )
    if options.speedup.predict and not options.draft:
        raise UsageError("evaluate: speedup.predict times the draft: pass `draft`")
    if options.mode == "chain" and not options.store:
        raise UsageError("evaluate: mode chain needs `store` (a folder of `extract`)")
    if options.mode != "chain" and not (options.data or options.prompts):
        raise UsageError(
            f"evaluate: mode {options.mode} needs `data` (a folder of `prepare`) or `prompts`"
        )


def _recorded_target(
    options: EvaluateOptions, drafted_by: DraftSource | None
) -> dict[str, Any] | None:
    """The target that the inputs' manifests name."""
    if drafted_by is not None and (recorded := drafted_by.recorded_target) is not None:
        return recorded
    if options.mode == "chain":
        return finished_manifest(options.store).result["target"]
    if options.data and not options.prompts:
        return load_finished(options.data, "prepare").result["target"]
    return None


def _describe_answers(options: EvaluateOptions, target: Target) -> dict[str, Any]:
    if options.mode == "chain":
        return describe_input(options.store, finished_manifest(options.store))
    if not options.prompts:
        target.check_made_by(
            load_finished(options.data, "prepare").inputs["target"]["fingerprint"],
            f"{options.data} was prepared for",
            "Run `paceline prepare` with this target.",
        )
    return describe_questions(options)


def _write_rows(folder: Path, measured: Measured) -> dict[str, Any]:
    """Returns what the result says of the files."""
    files = {CONVERSATIONS_FILE: measured.conversations, ANSWERS_FILE: measured.answers}
    for name, rows in files.items():
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(folder / name, text.encode())
    return describe_side_files(folder, files)
