"""The `vllm` engine: a target in vLLM, its hidden states through a tap in the workers.

Everything of vLLM's that is used here is public: `LLM`, its engine's `add_request`, `step`,
`abort_request` and `collective_rpc`.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.engine import EngineInfo
from paceline.extract.sink import Destination
from paceline.extract.vllm import wire
from paceline.extract.vllm.capture import Capture, CaptureSetup, slot_count
from paceline.extract.vllm.liveness import call_watched
from paceline.extract.vllm.settings import VllmSettings, check_effective
from paceline.extract.vllm.wire import Message
from paceline.vllm_process import free_memory, set_environment, start

logger = logging.getLogger(__name__)


# Triton multiplies float32 in TF32 unless it is told otherwise: attention would be 1e-3 off.
_PRECISE_ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}

# A name, the prompt's token ids and vLLM's SamplingParams.
TextRequest = tuple[str, list[int], Any]


class VllmEngine:
    """See `extract.engine.Engine`. One vLLM engine, in this process or in those it starts."""

    def __init__(self, settings: VllmSettings, num_layers: int, dtype: str) -> None:
        precise = _PRECISE_ENVIRONMENT if dtype == "float32" else {}
        set_environment({**settings.environment, **precise})
        import vllm

        self._settings = settings
        self._num_layers = num_layers
        self._number = 0
        self._compared = False
        self._requests: set[str] = set()
        # vLLM's constructors raise whatever their parts raise.
        try:
            self._llm, self._processes = start(settings.arguments, settings.driver)
        except Exception as error:
            raise EngineError(
                f"vLLM {vllm.__version__} could not load {settings.arguments['model']}: {error}"
            ) from error
        self._engine = self._llm.llm_engine
        try:
            self.all_settings = self._effective_settings()
            self.settings = check_effective(self.all_settings, dtype, settings.captures)
            self.info = EngineInfo("vllm", vllm.__version__, dtype, self._recorded())
        except BaseException:
            # Nobody else can: whoever asked for the engine has nothing in hand, and in a notebook
            # the model would stay on the GPU.
            self.close()
            raise

    def _effective_settings(self) -> list[Message]:
        """Those of every worker."""
        answers = self.call("paceline_settings")
        for answer in answers:
            if "error" in answer:
                wire.raise_error(answer["error"])
        return answers

    def capture(
        self,
        samples: Iterable[TokenSample],
        plan: LayerPlan,
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> None:
        compare = self.settings["tensor_parallel"] > 1 and not self._compared
        spec = destination.spec
        row_bytes = len(plan.all) * spec.hidden_size * spec.torch_dtype.itemsize + 16
        slot_bytes = row_bytes * self.settings["max_num_batched_tokens"]
        writers = 1 if self.settings["device"] == "cpu" else self._settings.writers
        with tempfile.TemporaryDirectory(dir=self._settings.scratch) as spool:
            setup = CaptureSetup(
                plan=plan,
                destination=destination,
                num_layers=self._num_layers,
                num_slots=slot_count(self._settings.host_memory_bytes, slot_bytes),
                writers=[self._settings.replica * writers + i for i in range(writers)],
                spool=spool,
                compare_ranks=compare,
            )
            Capture(self, setup, on_tokens).run(destination.missing(samples))
        self._compared = True

    def greedy(self, prompts: Sequence[np.ndarray], num_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        answers: dict[str, list[int]] = {}

        def finished(name: str, ids: list[int]) -> list[TextRequest]:
            answers[name] = ids
            return []

        names = [str(i) for i in range(len(prompts))]
        requests = [
            (n, np.asarray(p).tolist(), params) for n, p in zip(names, prompts, strict=True)
        ]
        self.complete(requests, finished)
        return [answers[name] for name in names]

    def complete(
        self,
        requests: Iterable[TextRequest],
        on_done: Callable[[str, list[int]], list[TextRequest]],
    ) -> None:
        """Let vLLM continue prompts. on_done(name, token ids) is called as each is finished, and
        may give further requests."""
        names: dict[str, str] = {}

        def add(wanted: Iterable[TextRequest]) -> None:
            for name, prompt, params in wanted:
                request = f"paceline-text-{self.next_number()}"
                names[request] = name
                self._add(request, prompt, params)

        add(requests)
        while self.busy():
            for output in self._step():
                ids = list(output.outputs[0].token_ids)
                add(on_done(names.pop(output.request_id), ids))

    @property
    def in_this_process(self) -> bool:
        """The model is in this process, not in those that vLLM starts."""
        return not self._processes

    def close(self) -> None:
        """Let go of the model; processes that vLLM started end, GPU memory is free again."""
        if self._llm is None:
            return
        self._engine.engine_core.shutdown()
        self._llm = self._engine = None
        if self.in_this_process:
            free_memory()

    # --- what a capture needs: see capture.Requests ---

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def add(self, request: str, prompt: list[int]) -> None:
        from vllm import SamplingParams

        # One token is sampled since a step must end so; nothing is decoded.
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._add(request, prompt, params)

    def step(self) -> list[str]:
        """Run one step; the ids of the requests that it finished."""
        return [output.request_id for output in self._step()]

    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def abort_all(self) -> None:
        """Drop all that runs or waits, and finish a step that was left between its two phases."""
        self._engine.abort_request(sorted(self._requests))
        self._requests.clear()
        self.call("paceline_settle")

    def call(self, method: str, *args: Any) -> list[Message]:
        """A method of the worker extension on every worker; one answer each, in rank order."""
        return call_watched(lambda: self._engine.collective_rpc(method, args=args), self._processes)

    def _add(self, request: str, prompt: list[int], params: Any) -> None:
        # vLLM raises for what it will not run, such as a prompt beyond `max_model_len`.
        try:
            self._engine.add_request(request, {"prompt_token_ids": prompt}, params)
        except Exception as error:
            raise EngineError(
                f"vLLM refuses a prompt of {len(prompt)} tokens: {error} Mend `engine_options` "
                f"(max_model_len is {self.settings['max_model_len']}) and run the same command "
                "again"
            ) from error
        self._requests.add(request)

    def _step(self) -> list[Any]:
        """One step; outputs of finished requests. What fails in vLLM leaves as an EngineError,
        with the engine put back in order where it still lives."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._recover(error)
            raise EngineError(f"vLLM failed in a step: {error!r}") from error
        finished = [output for output in outputs if output.finished]
        self._requests.difference_update(output.request_id for output in finished)
        return finished

    def _recover(self, error: Exception) -> None:
        try:
            self.abort_all()
        except Exception as second:
            logger.warning("vLLM cannot be used any more after %r: %r", error, second)

    def _recorded(self) -> Message:
        own = ("tensor_rank", "stage")
        known = {k: v for k, v in self.settings.items() if k not in own}
        in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        return {**known, "in_process": in_process, "torch": torch.__version__}
