"""`generate` through vLLM: the same engine, answers instead of states."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from paceline.answers.engine import LENGTH, STOP, Answer, Prompt, Sampling
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.extract.vllm.engine import TextRequest, VllmEngine
from paceline.extract.vllm.settings import VllmSettings, llm_arguments
from paceline.recipe import GenerateOptions
from paceline.target.spec import Target


class VllmAnswers:
    """See `answers.engine.AnswerEngine`."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.describe: dict[str, Any] = asdict(engine.info)

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        texts: dict[str, list[int]] = {}
        prompts = self._fitting(prompts, sampling, on_answer)

        def finished(key: str, ids: list[int]) -> list[TextRequest]:
            if key in texts:
                on_answer(_answer(key, texts[key], ids, sampling))
                return []
            texts[key] = ids
            if sampling.num_past_end:
                # What the target goes on to write when its end of turn is not heeded.
                return [(key, by_key[key].ids + ids, _parameters(by_key[key], sampling, past=True))]
            on_answer(_answer(key, ids, [], sampling))
            return []

        by_key = {prompt.key: prompt for prompt in prompts}
        requests = [(p.key, p.ids, _parameters(p, sampling, past=False)) for p in prompts]
        self._engine.complete(requests, finished)

    def close(self) -> None:
        self._engine.close()

    def _fitting(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> list[Prompt]:
        """Those that this engine has room for: `engine_options` may give it a shorter context than
        the target's, and vLLM raises for a prompt beyond it. The others are refused one by one."""
        context = self._engine.settings["max_model_len"]
        longest = context - sampling.max_new_tokens - sampling.num_past_end
        for prompt in prompts:
            if len(prompt.ids) > longest:
                problem = (
                    f"the prompt has {len(prompt.ids)} tokens; the engine's context "
                    f"(max_model_len {context}) leaves room for {max(longest, 0)}"
                )
                on_answer(Answer(prompt.key, [], STOP, refusal=problem))
        return [prompt for prompt in prompts if len(prompt.ids) <= longest]


def _parameters(prompt: Prompt, sampling: Sampling, past: bool) -> Any:
    """SamplingParams of an answer, or of what is recorded past its end."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.num_past_end if past else sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=prompt.seed if sampling.temperature > 0 else None,
        stop_token_ids=None if past else list(sampling.end_ids),
        ignore_eos=past,
        detokenize=False,
    )


def _answer(key: str, ids: list[int], past: list[int], sampling: Sampling) -> Answer:
    reason = STOP if ids and ids[-1] in sampling.end_ids else LENGTH
    return Answer(key, ids + past, reason, num_past_end=len(past))


def open_engine(options: GenerateOptions, target: Target) -> VllmAnswers:
    """One vLLM engine for the options of `generate`."""
    dtype = dtype_name(
        choose_dtype(options.dtype, choose_device(options.device), target.native_dtype())
    )
    wanted = {"enforce_eager": True, **options.engine_options}
    arguments = llm_arguments(target, dtype, wanted, None, captures=False)
    settings = VllmSettings(arguments, captures=False)
    return VllmAnswers(VllmEngine(settings, target.num_layers, dtype))
