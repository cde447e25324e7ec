"""A vLLM server that already runs: its completions, and its counters from /metrics."""

import time
from typing import Any

import httpx

from paceline.answers.engine import Answer, Prompt, Sampling
from paceline.answers.openai_engine import OpenAIAnswers
from paceline.errors import EngineError
from paceline.evaluate.metrics import DraftCounters, of_page
from paceline.recipe import EvaluateOptions, GenerateOptions

_LOGPROBS = 20
# A server counts a step just after it has sent the step's tokens.
_SETTLE_S = 10.0
_POLL_S = 0.02


class RunningServer:
    """See `serving.Server`."""

    def __init__(self, url: str, options: EvaluateOptions, end_ids: tuple[int, ...]) -> None:
        """url: the API's base, ending in /v1; the metrics are beside it, at /metrics."""
        self._url = url.rstrip("/")
        self._options = options
        self._sampling = Sampling(options.max_new_tokens, end_ids)
        self._model = options.served_model
        engine = self._engine(1)
        self._model = engine.model  # known from here on, so that no request has to ask again
        self._client = httpx.Client(headers=engine.headers, timeout=60.0, trust_env=False)
        self.describe: dict[str, Any] = {
            "name": "vllm",
            "version": self._version(),
            "started_here": False,
            "model": self._model,
        }

    def answer(self, prompts: list[list[int]], at_a_time: int) -> list[list[int]]:
        answers: dict[str, Answer] = {}

        def keep(answer: Answer) -> None:
            answers[answer.key] = answer

        asked = [Prompt(str(i), ids) for i, ids in enumerate(prompts)]
        self._engine(at_a_time).answer(asked, self._sampling, keep)
        for prompt in asked:
            answer = answers[prompt.key]
            if answer.refusal is not None or answer.ids is None:
                raise EngineError(
                    f"{self._url}: {answer.refusal or 'gives no token ids (vLLM does)'}"
                )
        return [answers[prompt.key].ids for prompt in asked]

    def counters(self, generated: int = 0) -> DraftCounters:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            found = of_page(self._get("/metrics").text)
            if found.generated >= generated or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def gap(self, prompt: list[int], own: int, other: int) -> float | None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": _LOGPROBS,
            "return_tokens_as_token_ids": True,
        }
        response = self._client.post(f"{self._url}/completions", json=body)
        if response.status_code != httpx.codes.OK:
            return None
        likely = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        one, two = (likely.get(f"token_id:{token}") for token in (own, other))
        return None if one is None or two is None else one - two

    def close(self) -> None:
        self._client.close()

    def _engine(self, at_a_time: int) -> OpenAIAnswers:
        return OpenAIAnswers(
            GenerateOptions(
                engine="openai",
                server=self._url,
                api_key=self._options.api_key,
                served_model=self._model,
                concurrency=at_a_time,
            )
        )

    def _version(self) -> str | None:
        return self._get("/version").json().get("version")

    def _get(self, path: str) -> httpx.Response:
        url = self._url.removesuffix("/v1") + path
        try:
            response = self._client.get(url)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{url} does not answer: {error}") from error
        return response
