"""Engine `openai` against a real HTTP server process: exact ids, patience, bounds, nothing lost."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

import paceline
from paceline.answers import openai_engine
from paceline.dataset import TokenDataset
from paceline.errors import DataError, EngineError, UsageError
from paceline.prepare.template import ChatTemplate
from paceline.recipe import GenerateOptions
from tests.prepare import toys
from tests.prepare.killing import Killer
from tests.prepare.server import answer_of, continuation, prompt_of_chat
from tests.prepare.test_generate import Generated
from tests.prepare.test_kills import importable, kill_until_done, published  # noqa: F401
from tests.prepare.toys import chat, chatml_target, write_rows

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.CHATML_PROMPT)


@pytest.fixture
def end(target: Path) -> int:
    return AutoTokenizer.from_pretrained(target).eos_token_id


@pytest.fixture
def serve(end: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts servers; gives their base URLs."""
    monkeypatch.setattr(openai_engine, "_FIRST_WAIT_S", 0.01)
    processes = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "tests.prepare.server", "--end", str(end), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def stats(url: str) -> dict[str, int]:
    return httpx.get(url.replace("/v1", "/stats"), trust_env=False).json()


def openai(url: str, **options: Any) -> dict[str, Any]:
    return {"engine": "openai", "server": url} | options


ROWS = [chat(f"question {i}", id=f"r{i}") for i in range(60)]


def test_exact_ids_come_back_and_reach_prepare(
    tmp_path: Path, target: Path, end: int, serve: Callable[..., str]
) -> None:
    done = Generated(tmp_path, target, ROWS, **openai(serve()))
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert [row["id"] for row in done.rows] == [f"r{i}" for i in range(60)]
    reasons = set()
    for row, given in zip(done.rows, ROWS, strict=True):
        text = tokenizer.apply_chat_template(
            given["messages"], tokenize=False, add_generation_prompt=True
        )
        assert row["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, reason = answer_of(row["prompt_ids"], 8, end)
        assert (row["response_ids"], row["finish_reason"]) == (ids, reason)
        assert row["messages"][-1]["content"] == tokenizer.decode(
            ids[:-1] if reason == "stop" else ids
        )
        reasons.add(reason)
    assert reasons == {"stop", "length"}
    assert done.result["exact_answers"] == 60
    assert done.result["engines"] == [
        {"name": "openai", "server_api": "completions", "model": "toy"}
    ]
    paceline.prepare(target=str(target), data=[str(done.folder)], out=str(tmp_path / "out"))
    samples = list(TokenDataset(tmp_path / "out"))
    assert [s.input_ids.tolist() for s in samples] == [
        row["prompt_ids"] + row["response_ids"] for row in done.rows
    ]


def test_tokens_past_the_end(
    tmp_path: Path, target: Path, end: int, serve: Callable[..., str]
) -> None:
    done = Generated(tmp_path, target, ROWS[:9], **openai(serve()), record_past_end=3)
    for row in done.rows:
        ids, reason = answer_of(row["prompt_ids"], 8, end)
        past = continuation(row["prompt_ids"] + ids, 3)
        assert row["response_ids"] == ids + past
        assert (row["num_past_end"], row["finish_reason"]) == (3, reason)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_servers_own_sampling_defaults_do_not_count(
    tmp_path: Path, target: Path, serve: Callable[..., str], api: str
) -> None:
    """vLLM and SGLang take them from the target's generation config."""
    plain = Generated(tmp_path / "a", target, ROWS[:5], **openai(serve(), server_api=api))
    url = serve("--generation-config")
    done = Generated(tmp_path / "b", target, ROWS[:5], **openai(url, server_api=api))
    assert done.rows == plain.rows


def test_trouble_of_every_kind_loses_and_doubles_nothing(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    plain = Generated(tmp_path / "a", target, ROWS, **openai(serve()))
    url = serve("--trouble", "429,500,502,503,drop,hang", "--hang", "3")
    options = openai(url, concurrency=8, request_timeout_s=1.0)
    done = Generated(tmp_path / "b", target, ROWS, **options)
    assert done.rows == plain.rows
    seen = stats(url)
    assert {"429", "500", "502", "503", "drop", "hang"} <= set(seen)
    assert seen["served"] == 60


def test_requests_at_a_time_are_bounded(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    url = serve("--delay", "0.05")
    Generated(tmp_path, target, ROWS[:30], **openai(url, concurrency=5))
    assert stats(url)["most_in_flight"] == 5


def test_a_server_that_stays_down_stops_the_run_and_what_was_answered_is_kept(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    url = serve("--down-after", "7")
    options = openai(url, concurrency=1, served_model="toy")
    with pytest.raises(EngineError, match="no answer after 3 tries, the last said status 503"):
        Generated(tmp_path, target, ROWS, **options, max_retries=2)
    journal = (tmp_path / "generated" / "journal.jsonl").read_text().splitlines()
    assert len(journal) == stats(url)["served"] == 7
    done = Generated(tmp_path, target, ROWS, **options, max_retries=2)
    assert len(done.rows) == 60
    # What the journal had was not asked for again.
    assert stats(url)["served"] == 60


def test_a_prompt_that_the_server_refuses_is_a_row_that_is_counted(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    rows = [*ROWS[:3], chat("x" * 450, id="long")]
    done = Generated(tmp_path, target, rows, **openai(serve()))
    assert [row["id"] for row in done.rows] == ["r0", "r1", "r2"]
    assert done.result["skipped"] == {"no_answer": 1}
    record = json.loads((done.folder / "answers" / "00000.json").read_text())
    assert "the prompt is too long" in record["skipped"][0]["detail"]


def test_an_answer_that_a_server_does_not_go_on_from_costs_its_row_alone(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    """Its context is full at the end of the answer, not before."""
    rows = [*ROWS[:3], chat("x" * 60, id="long")]
    longest = max(
        len(row["prompt_ids"])
        for row in Generated(tmp_path / "a", target, rows, **openai(serve())).rows
    )
    done = Generated(
        tmp_path / "b", target, rows, **openai(serve("--longest", str(longest))), record_past_end=3
    )
    assert [row["id"] for row in done.rows] == ["r0", "r1", "r2"]
    assert done.result["skipped"] == {"no_answer": 1}


def test_a_server_that_refuses_everything_stops_the_run(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    rows = [chat("x" * (450 + i)) for i in range(10)]
    with pytest.raises(EngineError, match="refused all of 10 prompts.*too long"):
        Generated(tmp_path, target, rows, **openai(serve()))


def test_what_a_server_refused_is_asked_again_by_the_next_run(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    with pytest.raises(EngineError, match="refused all of 60 prompts"):
        Generated(tmp_path, target, ROWS, **openai(serve("--longest", "1")))
    url = serve()
    assert len(Generated(tmp_path, target, ROWS, **openai(url)).rows) == 60
    assert stats(url)["served"] == 60


def test_a_later_turn_that_a_server_refuses_leaves_the_answers_before_it(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    rows = [{"id": f"r{i}", "turns": [f"q{i}", "x" * 400, "y"]} for i in range(10)]
    done = Generated(tmp_path, target, rows, **openai(serve()), max_new_tokens=20)
    assert [(row["id"], len(row["messages"])) for row in done.rows] == [
        (f"r{i}", 2) for i in range(10)
    ]
    assert done.result["skipped"] == {}
    assert done.result["unanswered_turns"] == 20
    record = json.loads((done.folder / "answers" / "00000.json").read_text())
    assert [(entry["row"], entry["unanswered"]) for entry in record["shortened"]] == [
        (i, 2) for i in range(1, 11)
    ]
    assert all("the prompt is too long" in entry["detail"] for entry in record["shortened"])


def test_own_prompts_that_a_server_refuses_stop_the_run_with_its_words(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    options = openai(serve("--longest", "1"), out=str(tmp_path / "out"))
    with pytest.raises(EngineError, match="self_prompt: the server refuses it.*prompt is too long"):
        paceline.generate(target=str(target), self_prompt=2, **options)


def test_the_chat_api_with_ids(
    tmp_path: Path, target: Path, end: int, serve: Callable[..., str]
) -> None:
    options = {"chat_template_kwargs": {"mood": "glad"}, "system_prompt": "S"}
    url = serve()
    done = Generated(tmp_path, target, ROWS[:5], **openai(url, server_api="chat"), **options)
    for row, given in zip(done.rows, ROWS, strict=False):
        messages = [{"role": "system", "content": "S"}, *given["messages"]]
        sent = {"messages": messages, "chat_template_kwargs": {"mood": "glad"}}
        # The ids are the server's own: it rendered the prompt.
        assert row["prompt_ids"] == prompt_of_chat(sent)
        ids, reason = answer_of(row["prompt_ids"], 8, end)
        assert (row["response_ids"], row["finish_reason"]) == (ids, reason)
    assert done.result["exact_answers"] == 5


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_server_without_ids_gives_text(
    tmp_path: Path, target: Path, serve: Callable[..., str], api: str
) -> None:
    url = serve("--no-ids")
    rows = [chat(f"q{i}", "OLD", "more") for i in range(4)]
    done = Generated(tmp_path, target, rows, **openai(url, server_api=api), max_new_tokens=20)
    assert done.result["exact_answers"] == 0
    assert done.result["answers"] == 8
    for row in done.rows:
        assert "response_ids" not in row
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
        assert all(ord(c) >= 0x100 for c in row["messages"][1]["content"])
    result = paceline.prepare(
        target=str(target), data=[str(done.folder)], out=str(tmp_path / "out")
    )
    # Their ids are then made from the text.
    assert result["mask_methods"] == {"rendered_prefix": 4}


def test_an_answer_told_by_words_that_was_cut_has_no_end(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    done = Generated(tmp_path, target, ROWS, **openai(serve("--no-ids")), max_new_tokens=4)
    reasons = [row["finish_reason"] for row in done.rows]
    assert set(reasons) == {"stop", "length"}
    options = {"heldout_share": 0.0, "deduplicate": False}
    result = paceline.prepare(
        target=str(target), data=[str(done.folder)], out=str(tmp_path / "out"), **options
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    samples = list(TokenDataset(tmp_path / "out"))
    for row, reason, sample in zip(done.rows, reasons, samples, strict=True):
        end = "<|im_end|>" if reason == "stop" else ""
        said = tokenizer.decode(sample.input_ids[sample.loss_mask].tolist())
        assert said == row["messages"][-1]["content"] + end
        assert sample.finished == row["finished"] == (reason == "stop")
    assert result["unfinished"] == reasons.count("length")


def test_answers_inside_a_running_loop(
    tmp_path: Path, target: Path, serve: Callable[..., str]
) -> None:
    """As in a notebook, where every cell runs in a loop."""
    plain = Generated(tmp_path / "a", target, ROWS[:9], **openai(serve()))

    async def cell(folder: str, **options: Any) -> Generated:
        return Generated(tmp_path / folder, target, ROWS[:9], **options)

    assert asyncio.run(cell("b", **openai(serve()))).rows == plain.rows
    with pytest.raises(EngineError, match="is the server up"):
        asyncio.run(cell("c", **openai("http://127.0.0.1:9/v1")))


class _InterruptedSubmit(ThreadPoolExecutor):
    """Ctrl-C comes when the thread has begun its work and nobody waits for it yet."""

    begun: threading.Event

    def submit(self, *args: Any) -> Future:
        future = super().submit(*args)
        assert self.begun.wait(60)
        signal.raise_signal(signal.SIGINT)
        return future


@pytest.mark.usefixtures("heeds_interrupts")
@pytest.mark.parametrize("comes", ["while it waits", "before it waits"])
def test_an_interrupt_inside_a_running_loop_ends_the_requests(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    ended = []
    begun = threading.Event()

    async def long(*_: Any) -> None:
        if comes == "while it waits":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        begun.set()
        try:
            await asyncio.sleep(20)
            ended.append("by itself")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def cell() -> None:
        options = openai("http://127.0.0.1:9/v1", served_model="toy", concurrency=1)
        Generated(tmp_path, target, ROWS[:1], **options)

    monkeypatch.setattr(openai_engine.OpenAIAnswers, "_post", long)
    if comes == "before it waits":
        monkeypatch.setattr(_InterruptedSubmit, "begun", begun, raising=False)
        monkeypatch.setattr(openai_engine, "ThreadPoolExecutor", _InterruptedSubmit)
    # A loop as a notebook's kernel has it: no handler of asyncio's own.
    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert ended == ["cancelled"]


def test_past_the_end_needs_ids(tmp_path: Path, target: Path, serve: Callable[..., str]) -> None:
    with pytest.raises(EngineError, match="gives no token ids"):
        Generated(tmp_path, target, ROWS[:2], **openai(serve("--no-ids")), record_past_end=2)


def test_keys_and_models(
    tmp_path: Path, target: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = serve("--key", "secret", "--models", "toy,other")
    with pytest.raises(UsageError, match=r"serves \['toy', 'other'\]: choose one"):
        Generated(tmp_path / "a", target, ROWS[:2], **openai(url))
    with pytest.raises(EngineError, match="status 401"):
        Generated(tmp_path / "b", target, ROWS[:2], **openai(url, served_model="other"))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    done = Generated(tmp_path / "c", target, ROWS[:2], **openai(url, served_model="other"))
    assert len(done.rows) == 2
    # The key is written nowhere.
    for path in done.folder.rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes()
    with pytest.raises(EngineError, match="no model nobody"):
        Generated(tmp_path / "d", target, ROWS[:2], **openai(url, served_model="nobody"))


def test_no_server(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UsageError, match="needs `server`"):
        Generated(tmp_path / "a", target, ROWS[:2], engine="openai")
    with pytest.raises(EngineError, match="is the server up"):
        Generated(tmp_path / "b", target, ROWS[:2], **openai("http://127.0.0.1:9/v1"))


@pytest.mark.parametrize(
    "server", ["localhost:8000/v1", "http://localhost:80000/v1", "http://[::1/v1", "http:///v1"]
)
def test_a_server_that_is_no_url_is_refused_at_once(server: str) -> None:
    with pytest.raises(UsageError, match="is no URL such as http://localhost:8000/v1"):
        openai_engine.OpenAIAnswers(
            GenerateOptions(engine="openai", server=server, served_model="toy")
        )


def test_no_row_at_all(tmp_path: Path, target: Path, serve: Callable[..., str]) -> None:
    with pytest.raises(DataError, match="none of the 0 rows"):
        Generated(tmp_path, target, [], **openai(serve()))


def test_killed_clients_go_on(tmp_path: Path, target: Path, serve: Callable[..., str]) -> None:
    url = serve("--delay", "0.02", "--trouble", "500")
    plain = Generated(tmp_path / "a", target, ROWS, **openai(serve()))
    [whole] = published(plain.folder).values()
    options = {
        "target": str(target),
        "data": [write_rows(tmp_path / "rows.jsonl", ROWS)],
        "max_new_tokens": 8,
        "dtype": "float32",
        "device": "cpu",
        "concurrency": 4,
    }
    options |= openai(url, out=str(tmp_path / "b"))

    def progress(out: Path) -> int:
        journal = out / "journal.jsonl"
        lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
        return 100 * len(list(out.glob("answers/[0-9]*.jsonl"))) + lines

    killer = Killer("generate", 20, progress)
    out = kill_until_done(killer, options, most_steps=40)
    parts = published(out)
    assert len(parts) == 3
    assert b"".join(parts[name] for name in sorted(parts)) == whole


def test_thinking_reaches_servers_under_both_of_its_names() -> None:
    """vLLM 0.16 reads `reasoning` alone, SGLang `reasoning_content`; vLLM 0.32 takes either."""
    template = ChatTemplate(toys.CHATML_PROMPT, toys.toy_tokenizer(toys.CHATML_PROMPT))
    said = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert template.as_sent([said]) == [said | {"reasoning": "Hm."}]
