"""Answers through any OpenAI-compatible server: many requests at a time, tried again with patience.

`completions` sends the prompt's token ids and asks for the answer's (vLLM's return_token_ids);
`chat` sends messages. A server that gives no ids gives text, and the row says so.
"""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from paceline.answers.engine import STOP, Answer, Prompt, Sampling, common_reason
from paceline.errors import EngineError, UsageError
from paceline.recipe import GenerateOptions
from paceline.target.spec import Target

T = TypeVar("T")

# What vLLM and SGLang take from the target's generation config where a request says nothing:
# Qwen2.5's has top_k 20 and a penalty of 1.05, which changes greedy answers too.
_NOTHING_BESIDES = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Too many requests, and what a server says while it starts, stops or is in trouble.
_TRY_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
# The prompt's own fault: too long, or a form that the server's template refuses.
_REFUSED = {400, 413, 422}
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_SIGNALS_SEEN_S = 0.2


def open_engine(options: GenerateOptions, target: Target) -> "OpenAIAnswers":
    """Raises UsageError without `server`, or one that is no URL, EngineError where it does not
    answer."""
    if not options.server:
        raise UsageError("engine openai needs `server`, such as http://localhost:8000/v1")
    return OpenAIAnswers(options)


class OpenAIAnswers:
    """The engine `openai`; see AnswerEngine."""

    def __init__(self, options: GenerateOptions) -> None:
        self.options = options
        self.url = _checked_url(options.server)
        self.headers = _headers(options)
        self.model = options.served_model or _run(self._only_model())
        self.describe = {
            "name": "openai",
            "server_api": options.server_api,
            "model": self.model,
        }

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        try:
            _run(self._answer_all(prompts, sampling, on_answer))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    def close(self) -> None:
        """Nothing is held between calls."""

    async def _answer_all(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_answer: Callable[[Answer], None]
    ) -> None:
        """`concurrency` workers take prompts from one iterator; the first failure ends them all."""
        waiting = iter(prompts)
        async with self._client() as client, asyncio.TaskGroup() as group:
            for _ in range(min(self.options.concurrency, len(prompts))):
                group.create_task(self._work(client, waiting, sampling, on_answer))

    async def _work(
        self,
        client: httpx.AsyncClient,
        waiting: Iterator[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        for prompt in waiting:
            if self.options.server_api == "chat":
                answer = await self._chat(client, prompt, sampling)
            else:
                answer = await self._complete(client, prompt, sampling)
            on_answer(answer)

    async def _complete(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: Sampling
    ) -> Answer:
        body = self._body(prompt, sampling) | {"prompt": prompt.ids}
        choice = await self._post(client, "completions", body)
        if isinstance(choice, str):
            return _refused(prompt, choice)
        ids = choice.get("token_ids")
        if ids is None:
            message = {"role": "assistant", "content": self._part(choice, "text", str)}
            answer = Answer(prompt.key, None, choice["finish_reason"], message=message)
        else:
            answer = Answer(prompt.key, _with_end(ids, choice, sampling), choice["finish_reason"])
        return await self._past_end(client, prompt, sampling, answer)

    async def _chat(self, client: httpx.AsyncClient, prompt: Prompt, sampling: Sampling) -> Answer:
        body = self._body(prompt, sampling) | {"messages": prompt.messages}
        if self.options.chat_template_kwargs:
            body["chat_template_kwargs"] = self.options.chat_template_kwargs
        if prompt.tools:
            body["tools"] = prompt.tools
        choice = await self._post(client, "chat/completions", body)
        if isinstance(choice, str):
            return _refused(prompt, choice)
        ids, message = choice.get("token_ids"), self._part(choice, "message", dict)
        answer = Answer(
            prompt.key,
            None if ids is None else _with_end(ids, choice, sampling),
            choice["finish_reason"],
            message={k: v for k, v in message.items() if k in _MESSAGE_KEYS},
            prompt_ids=choice.get("prompt_token_ids") if ids is not None else None,
        )
        return await self._past_end(client, prompt, sampling, answer)

    async def _past_end(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: Sampling, answer: Answer
    ) -> Answer:
        """The answer with the tokens recorded past its end, asked for in a second request."""
        if not sampling.num_past_end:
            return answer
        if answer.ids is None:
            raise EngineError(
                f"{self.url} gives no token ids, so nothing can be recorded past an answer's end: "
                "set record_past_end to 0, or use a server that has return_token_ids (vLLM)"
            )
        more = replace(sampling, max_new_tokens=sampling.num_past_end)
        body = self._body(prompt, more) | {
            "prompt": [*(answer.prompt_ids or prompt.ids), *answer.ids],
            "ignore_eos": True,
            "stop_token_ids": [],
        }
        choice = await self._post(client, "completions", body)
        if isinstance(choice, str):
            return _refused(prompt, choice)
        past = choice.get("token_ids")
        if past is None or len(past) != sampling.num_past_end:
            raise EngineError(
                f"{self.url} did not go on past the end of an answer for "
                f"{sampling.num_past_end} tokens: {choice!r}"
            )
        return replace(answer, ids=[*answer.ids, *past], num_past_end=len(past))

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": prompt.seed % (1 << 31),
        }
        if self.options.server_extensions:
            # Without them a server cuts special tokens out of texts and keeps ids to itself.
            body |= _NOTHING_BESIDES | {
                "return_token_ids": True,
                "skip_special_tokens": False,
                "stop_token_ids": list(sampling.end_ids),
            }
        return body

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> dict[str, Any] | str:
        """The first choice of the answer, or why the server refuses the request.

        Raises EngineError when the server stays silent or says that something else is wrong.
        """
        wait = _FIRST_WAIT_S
        for attempt in range(self.options.max_retries + 1):
            problem, asked_wait = "", None
            try:
                response = await client.post(f"{self.url}/{path}", json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == httpx.codes.OK:
                    return self._choice(response)
                problem = f"status {response.status_code}: {response.text[:300]}"
                if response.status_code in _REFUSED:
                    return problem
                if response.status_code not in _TRY_AGAIN:
                    raise EngineError(f"{self.url}/{path}: {problem}")
                asked_wait = _retry_after(response)
            if attempt < self.options.max_retries:
                # A little chance keeps many clients from coming back all at once.
                await asyncio.sleep(asked_wait or wait * random.uniform(0.5, 1.5))
                wait = min(2 * wait, _LONGEST_WAIT_S)
        raise EngineError(
            f"{self.url}/{path}: no answer after {self.options.max_retries + 1} tries, the last "
            f"said {problem}. What was answered is kept: give the same command again."
        )

    def _choice(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
            choice = answer["choices"][0]
            choice["finish_reason"] = common_reason(choice["finish_reason"])
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{response.url} does not answer as an OpenAI-compatible server does: "
                f"{response.text[:300]}"
            ) from error
        # vLLM says the prompt's ids beside the choices in the chat API, in them in the other.
        if "prompt_token_ids" not in choice and answer.get("prompt_token_ids"):
            choice["prompt_token_ids"] = answer["prompt_token_ids"]
        return choice

    def _part(self, choice: dict[str, Any], name: str, kind: type) -> Any:
        if not isinstance(choice.get(name), kind):
            raise EngineError(
                f"{self.url} does not answer as an OpenAI-compatible server does: {name} is "
                f"{choice.get(name)!r} in {str(choice)[:300]}"
            )
        return choice[name]

    async def _only_model(self) -> str:
        try:
            async with self._client() as client:
                response = await client.get(f"{self.url}/models")
                response.raise_for_status()
                models = [entry["id"] for entry in response.json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{self.url}/models does not answer ({type(error).__name__}: {error}): is the "
                "server up, and does the URL end in /v1?"
            ) from error
        if len(models) != 1:
            raise UsageError(f"{self.url} serves {models}: choose one as `served_model`")
        return models[0]

    def _client(self) -> httpx.AsyncClient:
        # Connections are bounded by the number of workers; a request may wait for a free server.
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=httpx.Timeout(self.options.request_timeout_s, connect=30.0),
            limits=httpx.Limits(max_connections=self.options.concurrency),
            trust_env=False,
        )


_MESSAGE_KEYS = ("role", "content", "reasoning_content", "reasoning", "tool_calls")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The work's result. In a thread of its own where this one runs a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    interrupted = threading.Event()

    async def told() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        if interrupted.is_set():
            raise asyncio.CancelledError
        return await work

    with ThreadPoolExecutor(1) as thread:
        try:
            future = thread.submit(asyncio.run, told())
            # An interrupt that comes just before a thread waits is seen when it stops waiting.
            while not wait([future], timeout=_SIGNALS_SEEN_S).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # Else the interrupt would wait for all answers.
            interrupted.set()
            for loop, task in running:
                # A loop that has ended meanwhile is closed.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _with_end(ids: list[int], choice: dict[str, Any], sampling: Sampling) -> list[int]:
    """The ids with the token that ended them, which some servers leave out."""
    if choice["finish_reason"] != STOP or (ids and ids[-1] in sampling.end_ids):
        return ids
    if isinstance(choice.get("stop_reason"), int):
        return [*ids, choice["stop_reason"]]
    return [*ids, sampling.end_ids[0]] if len(sampling.end_ids) == 1 else ids


def _checked_url(server: str) -> str:
    """Raises UsageError for what no request can be sent to: httpx has errors of many kinds for it,
    and some would be tried again for minutes."""
    try:
        url = httpx.URL(server)
        usable = url.scheme in ("http", "https") and url.host and (url.port or 1) < 1 << 16
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise UsageError(f"server: {server!r} is no URL such as http://localhost:8000/v1")
    return server.rstrip("/")


def _refused(prompt: Prompt, problem: str) -> Answer:
    return Answer(prompt.key, [], STOP, refusal=f"the server refuses it: {problem}")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait; dates are not worth their parsing."""
    value = response.headers.get("retry-after", "")
    return min(float(value), 10 * _LONGEST_WAIT_S) if value.isdigit() else None


def _headers(options: GenerateOptions) -> dict[str, str]:
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
