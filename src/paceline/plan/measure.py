"""A short run of the costly stages on a few samples, in a folder of its own: real rates of this
machine, of this target, with the recipe's own settings."""

import json
import logging
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from paceline import align, extract, prepare, train
from paceline.answers.engine import open_engine
from paceline.contracts import TokenSample
from paceline.extract.transformers_engine import length_buckets
from paceline.plan.data import DataSample, iterate_rows
from paceline.plan.times import Measured
from paceline.prepare.answering import Answerer
from paceline.prepare.parts import list_answer_parts
from paceline.prepare.reading import find_files, read_rows
from paceline.prepare.template import ChatTemplate, require_template
from paceline.recipe import GenerateOptions, PlanOptions, StageOptions
from paceline.runlog import read_log
from paceline.store import StoreSpec
from paceline.store.sizes import store_size
from paceline.target.spec import Target

logger = logging.getLogger(__name__)

# Optimiser steps at the start that pay for set-up, as a share of those made.
_WARMING_SHARE = 0.25
_NEVER = 1 << 30


def measure(options: PlanOptions, planned: dict[str, StageOptions], data: DataSample) -> Measured:
    """Prepare, extract, align and train on a few of the samples. planned: the recipe's own options
    of each stage. Raises what the stages raise."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as name:
        folder = Path(name)
        samples = _spread(data.samples, planned["extract"].max_batch_tokens, options.measure_tokens)
        logger.info("plan: measuring on %d samples, %d steps", len(samples), options.measure_steps)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in iterate_rows(samples)))
        run = _Runner(planned, folder)
        prepare_s, _ = run.stage(
            "prepare", prepare, data=[str(rows)], split="train", deduplicate=False, limit=None
        )
        _, extracted = run.stage("extract", extract, data=run.at("prepare"), stream_bytes=None)
        run.stage("align", align, data=run.at("prepare"))
        train_s, _ = run.stage(
            "train",
            train,
            store=run.at("extract"),
            vocab=run.at("align"),
            max_steps=options.measure_steps,
            log_every=1,
            checkpoint_every=_NEVER,
            eval_every=None,
            load_best_model_at_end=False,
            trackers=[],
            follow=False,
        )
        per_step = seconds_per_step(folder / "train")
        timing = extracted["timing"]
        return Measured(
            prepare_start_s=prepare_s,
            extract_start_s=timing["start_s"],
            extract_tokens_per_s=timing["tokens"] / timing["capture_s"],
            train_start_s=max(train_s - options.measure_steps * per_step, 0.0),
            train_s_per_step=per_step,
            states_share=_states_share(folder / "extract", extracted["store"], samples),
        )


def measure_answers(options: GenerateOptions, target: Target) -> dict[str, float]:
    """Let the target answer one batch of prompts: mean tokens of an answer, answer tokens a second,
    seconds to start."""
    template = ChatTemplate(
        require_template(target, options.chat_template),
        target.tokenizer,
        options.chat_template_kwargs,
        options.system_prompt,
    )
    rows = list(islice(read_rows(find_files(options.data)), options.batch_size))
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        started = time.perf_counter()
        engine = open_engine(options, target)
        try:
            opened = time.perf_counter()
            Answerer(options, target, template, Path(folder)).answer_part(engine, 0, rows)
            seconds = time.perf_counter() - opened
        finally:
            engine.close()
        lengths = [n for part in list_answer_parts(Path(folder)) for n in _answer_lengths(part)]
    return {
        "answer_tokens": sum(lengths) / max(len(lengths), 1),
        "generate_tokens_per_s": max(sum(lengths), 1) / seconds,
        "generate_start_s": opened - started,
    }


class _Runner:
    """Runs stages with the recipe's options, but in a folder of their own."""

    def __init__(self, planned: dict[str, StageOptions], folder: Path) -> None:
        self._planned = planned
        self._folder = folder

    def at(self, stage: str) -> str:
        return str(self._folder / stage)

    def stage(
        self, name: str, run: Callable[..., dict[str, Any]], **changes: Any
    ) -> tuple[float, dict[str, Any]]:
        """Seconds that it took, and its result."""
        options = self._planned[name].model_copy(update={"out": self.at(name), **changes})
        started = time.perf_counter()
        result = run(options)
        return time.perf_counter() - started, result


def _spread(
    samples: tuple[TokenSample, ...], max_batch_tokens: int, num_tokens: int
) -> list[TokenSample]:
    """Whole batches as extraction forms them, evenly spread over their lengths, of about
    num_tokens: single samples picked at random would make batches with more padding."""
    usable = [s for s in samples if s.num_aux_rows]
    batches = list(length_buckets(usable, max_batch_tokens))
    total = sum(s.num_tokens for s in usable)
    count = min(len(batches), max(1, round(len(batches) * num_tokens / max(total, 1))))
    chosen = [batches[(2 * i + 1) * len(batches) // (2 * count)] for i in range(count)]
    return [sample for batch in chosen for sample in batch]


def seconds_per_step(folder: Path) -> float:
    """Of a training that logs every step, its first steps apart, which compile."""
    log = read_log(folder).train
    first = log[int(len(log) * _WARMING_SHARE)]
    return (log[-1]["elapsed_s"] - first["elapsed_s"]) / (log[-1]["step"] - first["step"])


def _states_share(folder: Path, spec: dict[str, Any], samples: list[TokenSample]) -> float:
    size = store_size(StoreSpec.from_dict(spec), samples)
    shards = sum(path.stat().st_size for path in folder.glob("shards/*.safetensors"))
    return (shards + size.index - (size.total - size.states)) / size.states


def _answer_lengths(part: Path) -> list[int]:
    lengths = []
    with part.open("rb") as file:
        for row in map(json.loads, file):
            for answer in row.get("answers", [row]):
                if answer.get("response_ids") is not None:
                    lengths.append(len(answer["response_ids"]) - answer["num_past_end"])
    return lengths
