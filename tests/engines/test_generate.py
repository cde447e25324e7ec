"""`generate` through a real `vllm serve`: the ids are the target's own greedy ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from paceline.target.spec import Target
from tests.engines.common import SMOLLM2

pytestmark = pytest.mark.engine_vllm

START_LIMIT_S = 240
QUESTIONS = ("Name three colours.", "Say hi.", "What is 2 + 2?", "Name a planet. " * 6)
ROWS = [
    {
        "id": f"r{i}",
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "OLD"},
            {"role": "user", "content": "Why?"},
        ],
    }
    for i, question in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def server(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of vLLM's server in a process group of its own.

    The module that `vllm serve` runs: the command itself asks for the package's version under the
    name vllm, which CPU builds do not have.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target.folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--block-size", "32"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_up(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def generate(out: Path, **options: Any) -> list[dict[str, Any]]:
    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    paceline.generate(
        target=SMOLLM2,
        data=[str(data)],
        out=str(out),
        max_new_tokens=24,
        dtype="float32",
        **options,
    )
    return [json.loads(line) for line in (out / "answers" / "00000.jsonl").open()]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same with transformers."""
    return generate(tmp_path_factory.mktemp("own") / "out", record_past_end=3)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_greedy_answers_through_a_server(
    tmp_path: Path, server: str, own: list[dict[str, Any]], api: str
) -> None:
    rows = generate(
        tmp_path / "out",
        engine="openai",
        server=server,
        server_api=api,
        record_past_end=3,
        concurrency=3,
    )
    assert [row["id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert rows == own
    answers = [answer for row in rows for answer in row.get("answers", [row])]
    assert {answer["finish_reason"] for answer in answers} == {"stop", "length"}
    assert any("answers" in row for row in rows)


def test_what_the_server_refuses_is_a_skipped_row(tmp_path: Path, server: str) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [ROWS[0], {"messages": [{"role": "user", "content": "long " * 700}]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = paceline.generate(
        target=SMOLLM2,
        data=[str(data)],
        out=str(tmp_path / "out"),
        engine="openai",
        server=server,
        max_new_tokens=4,
    )
    assert result["answered"] == 1
    assert result["skipped"] == {"no_answer": 1}
