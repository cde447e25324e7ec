"""The verb `generate`: on-policy answers by the target itself, exact token ids kept.

Rows in, JSONL parts out (`answers/NNNNN.jsonl`), one row a conversation, which `prepare` reads.
A part appears when whole; answers on the way to it are in a journal, so a kill loses next to
nothing and doubles nothing.
"""

import logging
from collections import Counter
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.answers.engine import open_engine
from paceline.artefact import StageFolder, open_stage
from paceline.errors import DataError, UsageError
from paceline.prepare.answering import Answerer, batches
from paceline.prepare.parts import counts_of, list_answer_parts, read_part_record
from paceline.prepare.reading import count_rows, find_files, fingerprint_files, read_rows
from paceline.prepare.self_prompt import PROMPTS_FILE, write_self_prompts
from paceline.prepare.template import ChatTemplate, require_template
from paceline.progress import progress_bar
from paceline.recipe import GenerateOptions
from paceline.side_files import describe_side_files
from paceline.target.spec import Target, open_target
from paceline.verbs import make_callable
from paceline.vllm_process import require_vllm

logger = logging.getLogger(__name__)


def run(options: GenerateOptions) -> dict[str, Any]:
    """Write answers; returns the manifest's result. See docs/generate.md.

    Raises UsageError, TargetError, DataError (no row can be answered), EngineError.
    """
    if not options.out:
        raise UsageError("generate: no `out` given: name the folder to write")
    target = open_target(options)
    files = find_files(options.data) if options.data or not options.self_prompt else []
    template = require_template(target, options.chat_template)
    inputs = {
        "target": target.describe_input(),
        "template": {"fingerprint": fingerprint.of_bytes(template.encode())},
        "data": {
            "path": [str(file) for file in files],
            "fingerprint": fingerprint_files(files),
        },
    }
    identity = options.identity()
    # The template is compared by its text, wherever its file lies.
    identity.pop("chat_template")
    with open_stage(options.out, "generate", inputs, identity, options.overwrite) as folder:
        if folder.done:
            return folder.result
        if options.engine == "vllm":
            require_vllm("generate")
        chat_template = ChatTemplate(
            template, target.tokenizer, options.chat_template_kwargs, options.system_prompt
        )
        _answer_all(options, target, chat_template, files, folder.path)
        return _finish(target, options, folder)


def _answer_all(
    options: GenerateOptions,
    target: Target,
    template: ChatTemplate,
    files: list[Path],
    folder: Path,
) -> None:
    """Answer every row that is not in a part yet; the engine is opened only if there are any."""
    parts = list_answer_parts(folder)
    done = sum(read_part_record(part)["rows"] for part in parts)
    if done:
        logger.info("%s: going on after %d rows", folder, done)
    if options.self_prompt:
        files = [folder / PROMPTS_FILE, *files]
    needs_prompts = bool(options.self_prompt) and not files[0].exists()
    rows = islice(read_rows(files), done, options.limit)
    waiting = batches(rows)
    first = None if needs_prompts else next(waiting, None)
    if first is None and not needs_prompts:
        return
    engine = open_engine(options, target)
    try:
        if needs_prompts:
            write_self_prompts(options, target, template, engine, folder)
        answerer = Answerer(options, target, template, folder)
        total = count_rows(files)
        if options.limit is not None:
            total = min(total or options.limit, options.limit)
        with progress_bar("generate", total, "rows") as bar:
            bar.advance(done)
            everything = chain([first] if first else [], waiting)
            for number, batch in enumerate(everything, start=len(parts)):
                answerer.answer_part(engine, number, batch)
                bar.advance(len(batch))
    finally:
        engine.close()


def _side_files(folder: Path, parts: list[Path]) -> list[Path]:
    """The records of the parts, which say what became of rows without an answer."""
    return [part.with_suffix(".json").relative_to(folder) for part in parts]


def _finish(target: Target, options: GenerateOptions, folder: StageFolder) -> dict[str, Any]:
    parts = list_answer_parts(folder.path)
    num_rows = unanswered = 0
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    engines: list[dict[str, Any]] = []
    for part in parts:
        record = read_part_record(part)
        num_rows += record["rows"]
        skipped.update(entry["reason"] for entry in record["skipped"])
        unanswered += sum(entry["unanswered"] for entry in record.get("shortened", ()))
        if record["engine"] not in engines:
            engines.append(record["engine"])
        of_part = dict(counts_of(part, record))
        reasons.update(of_part.pop("finish_reasons"))
        counts.update(of_part)
    if not counts["answered"]:
        details = [e["detail"] for p in parts for e in read_part_record(p)["skipped"]]
        raise DataError(
            f"none of the {num_rows} rows could be answered: {dict(skipped)}"
            + (f"; the first says: {details[0]}" if details else "")
        )
    result = {
        "target": asdict(target.reference),
        "rows": num_rows,
        "answered": counts["answered"],
        "answers": sum(reasons.values()),
        "exact_answers": counts["exact_answers"],
        "unanswered_turns": unanswered,
        "skipped": dict(skipped.most_common()),
        "finish_reasons": dict(reasons.most_common()),
        "response_tokens": counts["response_tokens"],
        "chat_template_kwargs": options.chat_template_kwargs,
        "system_prompt": options.system_prompt,
        "engines": engines,
        "parts": len(parts),
        **describe_side_files(folder.path, _side_files(folder.path, parts)),
    }
    return folder.finish(result, fingerprint.of_files(parts))


VERB = (GenerateOptions, run)

make_callable(__name__)
