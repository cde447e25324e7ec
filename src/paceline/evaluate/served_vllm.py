"""vLLM started here, with an exported draft or without one. Public parts of vLLM only: `LLM`, its
engine's `add_request` and `step`, `get_metrics`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import EngineError, UsageError
from paceline.evaluate.metrics import DraftCounters, of_samples
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target
from paceline.vllm_process import free_memory, set_environment, start

_OURS = ("model", "dtype", "speculative_config", "disable_log_stats", "data_parallel_size")
_LOGPROBS = 20  # vLLM's own limit, unless it is started otherwise


def vllm_arguments(
    options: EvaluateOptions, target: Target, dtype: str, longest: int
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, the draft's left out; longest: tokens of the longest request."""
    if wrong := [name for name in _OURS if name in options.engine_options]:
        raise UsageError(f"engine_options: evaluate sets {', '.join(wrong)} itself")
    positions = getattr(target.text_config, "max_position_embeddings", None) or longest
    return {
        "model": str(target.folder),
        "dtype": dtype,
        "trust_remote_code": target.reference.trust_remote_code,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "max_model_len": min(longest, positions),
        "max_num_seqs": max(options.batch_sizes),
        # Answers that one of two runs finds in a cache would be no comparison.
        "enable_prefix_caching": False,
        "seed": options.seed,
        **options.engine_options,
    }


def installed_version() -> str:
    """Imports vLLM as it is to run here. Raises UsageError where it is not installed."""
    # vLLM's own processes must not inherit this one's threads.
    set_environment({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    try:
        import vllm
    except ImportError as error:
        raise UsageError(
            f"mode served starts vLLM, which cannot be imported here ({error}): install "
            "paceline[vllm], or name a running server as `server`"
        ) from error
    return vllm.__version__


class InProcess:
    """See `serving.Server`."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        draft: Path,
        num_draft_tokens: int,
        max_new_tokens: int,
        end_ids: set[int],
    ) -> None:
        """num_draft_tokens 0: the target alone."""
        import vllm
        from vllm.platforms import current_platform

        arguments = dict(arguments)
        if current_platform.is_cpu():
            # Compiling takes a CPU minutes and gains it little.
            arguments.setdefault("enforce_eager", True)
        if num_draft_tokens:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": num_draft_tokens,
            }
        # vLLM's constructors raise whatever their parts raise.
        try:
            self._llm, self._processes = start(arguments)
        except Exception as error:
            raise EngineError(
                f"vLLM {vllm.__version__} could not serve {arguments['model']}"
                + (f" with the draft {draft}" if num_draft_tokens else "")
                + f": {error}"
            ) from error
        self._engine = self._llm.llm_engine
        self._number = 0
        self._greedy = vllm.SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0.0,
            stop_token_ids=sorted(end_ids),
            detokenize=False,
        )
        self.describe = {
            "name": "vllm",
            "version": vllm.__version__,
            "started_here": True,
            "device": current_platform.device_type,
            "enforce_eager": bool(arguments.get("enforce_eager", False)),
        }

    def answer(self, prompts: list[list[int]], at_a_time: int) -> list[list[int]]:
        """A request is added as soon as another is done."""
        outputs = self._complete([(prompt, self._greedy) for prompt in prompts], at_a_time)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def counters(self, generated: int = 0) -> DraftCounters:
        # In this process everything is counted before a step's outputs come back.
        return of_samples(_samples(self._llm.get_metrics()))

    def gap(self, prompt: list[int], own: int, other: int) -> float | None:
        from vllm import SamplingParams

        # The token after a prompt comes from the target alone: nothing is drafted for it.
        asked = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=_LOGPROBS, ignore_eos=True, detokenize=False
        )
        (output,) = self._complete([(prompt, asked)], 1)
        likely = output.outputs[0].logprobs[0]
        if own not in likely or other not in likely:
            return None
        return likely[own].logprob - likely[other].logprob

    def close(self) -> None:
        """Let go of the models; processes that vLLM started end, GPU memory is free again."""
        self._engine.engine_core.shutdown()
        self._llm = self._engine = None
        if not self._processes:
            free_memory()

    def _complete(self, requests: list[tuple[list[int], Any]], at_a_time: int) -> list[Any]:
        """Outputs in the order of the requests, at most so many of them under way."""
        waiting = iter(enumerate(requests))
        places: dict[str, int] = {}
        outputs: list[Any] = [None] * len(requests)
        # Whatever goes wrong inside vLLM comes out of its step.
        try:
            while True:
                while len(places) < at_a_time and (entry := next(waiting, None)) is not None:
                    self._add(*entry, places)
                if not places:
                    return outputs
                for output in self._engine.step():
                    if output.finished:
                        outputs[places.pop(output.request_id)] = output
        except Exception as error:
            raise EngineError(f"vLLM failed while it answered: {error!r}") from error

    def _add(self, place: int, request: tuple[list[int], Any], places: dict[str, int]) -> None:
        prompt, parameters = request
        self._number += 1
        name = f"paceline-{self._number}"
        places[name] = place
        self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)


def _samples(metrics: list[Any]) -> list[tuple[str, str | None, float]]:
    """vLLM gives the counters of the positions as one vector."""
    found: list[tuple[str, str | None, float]] = []
    for metric in metrics:
        if hasattr(metric, "values"):
            found += [(metric.name, str(i), value) for i, value in enumerate(metric.values)]
        elif hasattr(metric, "value"):
            found.append((metric.name, None, metric.value))
    return found
