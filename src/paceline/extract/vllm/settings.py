"""vLLM's settings: those that a capture must have, those with a better default, and what came of
them, read back from the workers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.dataset import TokenDataset
from paceline.errors import EngineError, UsageError
from paceline.extract.guards import num_positions
from paceline.recipe import ExtractOptions
from paceline.target.spec import Target

EXTENSION = "paceline.extract.vllm.extension.PacelineTap"

# Hooks see nothing under compilation; cached tokens run no forward pass; a drafter runs rows that
# are not the prompt's.
_FORCED = {"enforce_eager": True, "enable_prefix_caching": False, "speculative_config": None}
# Answers are not tapped, so only these are needed; the rest is vLLM's own, or the user's.
_FORCED_FOR_ANSWERS = {"speculative_config": None}
_OURS = ("model", "worker_extension_cls", "dtype", "data_parallel_size")

# Prefill is at its best from about this many tokens a step on: an H200 gains nothing beyond, and
# more is left to write when the last step is over.
_GPU_BATCHED_TOKENS = 8192
_MAX_SEQS = 256
HOST_MEMORY_BYTES = 6 << 30
# Shortest context that the probe can use: its prompts and their continuations.
_MIN_CONTEXT = 512
_LONG_ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


@dataclass(frozen=True)
class VllmSettings:
    """How to start vLLM.

    arguments: of `vllm.LLM`. scratch: a folder for what does not last; None: the temporary folder
    of the machine that the engine is on. replica: the number of this engine among those that share
    the work. driver: a process whose death ends all of it, besides the one that starts the engine.
    host_memory_bytes: of the ring that rows pass through. writers: threads that write shards, on a
    GPU; one waits for the disk while another writes. captures: whether states are tapped, or only
    answers written.
    """

    arguments: dict[str, Any]
    scratch: Path | None = None
    replica: int = 0
    driver: dict[str, Any] | None = None
    host_memory_bytes: int = HOST_MEMORY_BYTES
    writers: int = 4
    environment: dict[str, str] = field(default_factory=dict)
    captures: bool = True


def llm_arguments(
    target: Target,
    dtype: str,
    wanted: dict[str, Any],
    max_batch_tokens: int | None,
    captures: bool = True,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; UsageError where `wanted` contradicts what a capture, or else
    what `generate` must have."""
    forced = _FORCED if captures else _FORCED_FOR_ANSWERS
    wrong = [f"{k}={wanted[k]!r}" for k in forced if k in wanted and wanted[k] != forced[k]]
    wrong += [f"{k}={wanted[k]!r}" for k in _OURS if k in wanted]
    if wrong:
        raise UsageError(
            f"engine_options: {', '.join(wrong)} cannot be set: "
            f"{'extract' if captures else 'generate'} needs "
            f"{', '.join(f'{k}={v!r}' for k, v in forced.items())} and sets {', '.join(_OURS)} "
            "itself (several engines beside each other: option `workers`)"
        )
    arguments: dict[str, Any] = {
        "model": str(target.folder),
        "dtype": dtype,
        "trust_remote_code": target.reference.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        **forced,
        **wanted,
    }
    if max_batch_tokens is not None:
        arguments.setdefault("max_num_batched_tokens", max_batch_tokens)
    if budget := arguments.get("max_num_batched_tokens"):
        arguments.setdefault("max_num_seqs", min(_MAX_SEQS, budget))
    return arguments


def batched_tokens(options: ExtractOptions, on_cpu: bool, row_bytes: int) -> int:
    """Tokens of a step: what the user says, else as many as pay on the device and leave the ring
    of host memory small. row_bytes: of one token's captured states."""
    if on_cpu or "max_batch_tokens" in options.model_fields_set:
        return options.max_batch_tokens
    return max(1024, min(_GPU_BATCHED_TOKENS, HOST_MEMORY_BYTES // (3 * row_bytes)))


def context_length(options: ExtractOptions, target: Target) -> int | None:
    """Longest request: the data's longest sample and the token that vLLM samples after it, so
    that no KV cache is set aside for a context that nobody uses. None: vLLM's own choice."""
    if not options.data:
        return None
    longest = int(TokenDataset(options.data).manifest.options["max_length"]) + 1
    positions = num_positions(target)
    if positions is None:
        return max(longest, _MIN_CONTEXT)
    return max(min(longest, positions + 1), min(_MIN_CONTEXT, positions))


def context_environment(target: Target, length: int) -> dict[str, str]:
    """What vLLM must be told where a context of `length` is longer than the target's own: by the
    token that is sampled after a sample of all its positions. That token never runs, so nothing
    beyond the last position is computed."""
    positions = num_positions(target)
    return {} if positions is None or length <= positions else _LONG_ENVIRONMENT


def check_effective(
    found: list[dict[str, Any]], dtype: str, captures: bool = True
) -> dict[str, Any]:
    """The workers' own settings are what a capture (or else `generate`) needs; returns those of the
    first.

    vLLM changes settings on its own for some models, so what was asked for proves nothing.
    """
    wrong = []
    for settings in found:
        if captures and not settings["enforce_eager"]:
            wrong.append("enforce_eager is off: hooks would see nothing")
        if captures and settings["prefix_caching"]:
            wrong.append("prefix caching is on: cached tokens run no forward pass")
        if settings["speculative"]:
            wrong.append("speculative decoding is on")
        if settings["dtype"] != dtype:
            wrong.append(f"dtype is {settings['dtype']}, not {dtype}")
        # vLLM divides the residual stream of these by a factor in half precision.
        scaled = any(name in settings["architecture"] for name in ("Deepseek", "Kimi"))
        if captures and scaled and settings["dtype"] == "float16":
            wrong.append("float16 scales the residual stream of this architecture: use bfloat16")
    if wrong:
        raise EngineError("vLLM's effective settings: " + "; ".join(dict.fromkeys(wrong)))
    return found[0]
