"""Mode served: acceptance by vLLM's own counters, speed and outputs with and without the draft."""

import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.device import dtype_name
from paceline.errors import EvaluationError, UsageError
from paceline.evaluate.outputs import Difference, Key, answer_rows, compare, summary
from paceline.evaluate.prompts import Questions, open_questions
from paceline.evaluate.serving import Served, Server, ask, speed
from paceline.evaluate.walks import Measured, Walks
from paceline.forms.carry import FORMS, check_carried
from paceline.forms.config_json import Serving
from paceline.forms.layer_ids import IDS
from paceline.forms.load import read_json
from paceline.forms.names import SGLANG, VLLM
from paceline.forms.source import DraftSource
from paceline.forms.write import write_draft
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target


def measure_served(
    options: EvaluateOptions, source: DraftSource | None, target: Target, dtype: torch.dtype
) -> Measured:
    """Measure through vLLM. source: not needed for a server that already runs with its draft.

    A checkpoint is read by paceline first, which refuses what vLLM would pass over in silence; a
    trained draft is written as `export` writes it. Raises EvaluationError, EngineError; ExportError
    for a draft that vLLM would serve wrong; UsageError where what it takes is not installed.
    """
    questions = open_questions(options, target)
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        servers = (
            _running(options, target)
            if options.server
            else _started(options, source, target, dtype, questions, Path(scratch))
        )
        return measure_servers(options, questions, servers)


@dataclass(frozen=True)
class Servers:
    """How to open each, when it is its turn: two at a time need not fit.

    drafting: by chain length; None: whatever the server runs with.
    """

    plain: Callable[[], Server] | None
    drafting: dict[int | None, Callable[[], Server]]


def _running(options: EvaluateOptions, target: Target) -> Servers:
    try:
        from paceline.evaluate.served_http import RunningServer
    except ImportError as error:
        raise UsageError(f"`server` needs the extra paceline[openai]: {error}") from error

    at = lambda url: lambda: RunningServer(url, options, target.end_of_turn_ids)
    plain = at(options.plain_server) if options.plain_server and options.compare_plain else None
    return Servers(plain, {None: at(options.server)})


def _started(
    options: EvaluateOptions,
    source: DraftSource,
    target: Target,
    dtype: torch.dtype,
    questions: Questions,
    scratch: Path,
) -> Servers:
    from paceline.evaluate.served_vllm import InProcess, installed_version, vllm_arguments

    draft = source.load(target)
    check_carried(FORMS[VLLM], draft.config, target.num_layers, _release(installed_version()))
    folder = source.folder
    if not _is_read_as_meant(source):
        folder = scratch / VLLM
        in_parts = options.engine_options.get("pipeline_parallel_size", 1) > 1
        serving = Serving(dtype_name(dtype), copies_embedding=in_parts)
        write_draft(folder, draft, VLLM, target, serving)
    longest = questions.longest(options.max_new_tokens) + max(options.num_draft_tokens) + 1
    arguments = vllm_arguments(options, target, dtype_name(dtype), longest)
    start = lambda k: (
        lambda: InProcess(arguments, folder, k, options.max_new_tokens, questions.end_ids)
    )
    return Servers(
        start(0) if options.compare_plain else None,
        {k: start(k) for k in options.num_draft_tokens},
    )


def _is_read_as_meant(source: DraftSource) -> bool:
    """Whether every vLLM takes the layers from these files as `load` does. A compact draft is no
    checkpoint, and SGLang's ids would be read as vLLM's own. Nested ids alone are passed over, for
    the default layers, below 0.22 and by the V2 runner (0.32.0)."""
    if source.trained is not None or source.compact or source.form == SGLANG:
        return False
    return bool(read_json(source.folder).get(IDS))


def _release(version: str) -> str:
    """0.32.0.post1 -> 0.32.0."""
    return ".".join(re.findall(r"\d+", version)[:3])


@dataclass
class _Outcome:
    """Collects what the servers did, one chain length after the other."""

    plain: Served | None
    prompts: dict[Key, list[int]]
    walks: Walks = field(default_factory=lambda: Walks([]))
    speed: dict[str, Any] = field(default_factory=dict)
    short_drafts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, k: int, server: Server, served: Served) -> None:
        self.walks.lengths.append(k)
        short = 0
        for counted in served.counted:
            counts = counted.counters.counts()
            counts.conversations = counted.conversations
            self.walks.add(counted.name, counted.source, {k: counts}, counted.content)
            short += k * counted.counters.drafts - counted.counters.draft_tokens
        if short:
            self.short_drafts[str(k)] = short
        self.speed[str(k)] = {
            str(size): speed(rate, self.plain and self.plain.tokens_per_s[size])
            for size, rate in served.tokens_per_s.items()
        }
        self.answers += answer_rows(k, served.answers)
        if self.plain is not None:
            gap = lambda key, before, own, other: server.gap(self.prompts[key] + before, own, other)
            self.differences += compare(self.plain.answers, served.answers, k, gap)


def measure_servers(options: EvaluateOptions, questions: Questions, servers: Servers) -> Measured:
    """Ask the target alone, then each server with a draft, and set them beside each other."""
    plain = None
    if servers.plain is not None:
        with closing(servers.plain()) as server:
            plain = ask(server, questions, options.batch_sizes, "plain")
    outcome = _Outcome(plain, {})
    if plain is not None:
        outcome.answers += answer_rows(0, plain.answers)
    describe: dict[str, Any] = {}
    for wanted, opened in servers.drafting.items():
        with closing(opened()) as server:
            k = wanted or server.counters().num_draft_tokens
            if not k:
                raise EvaluationError(
                    f"{options.server} counts no drafts: start it with a draft (`paceline export` "
                    "prints the command)"
                )
            served = ask(server, questions, options.batch_sizes, f"K = {k}")
            outcome.prompts = questions.by_key()
            outcome.add(k, server, served)
            describe = server.describe
    result = {
        "results": outcome.walks.table(options),
        "baselines": {},
        "server": describe,
        "speed": outcome.speed,
        "short_drafts": outcome.short_drafts,
    }
    if plain is not None:
        num_outputs = len(plain.answers) * len(servers.drafting)
        result["lossless"] = summary(outcome.differences, num_outputs)
    return Measured(result, [*outcome.walks.rows()], outcome.answers)
