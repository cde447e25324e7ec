"""`generate` through vLLM, in process and by a server: the ids are the target's own greedy ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.target.spec import Target
from tests.engines.api_server import api_server
from tests.engines.common import SMOLLM2

pytestmark = pytest.mark.engine_vllm

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
    with api_server(target, tmp_path_factory.mktemp("serve")) as url:
        yield url


LONG_ROW = {"messages": [{"role": "user", "content": "long " * 700}]}


def generate(out: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> list[dict[str, Any]]:
    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
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


def test_greedy_answers_in_process(
    tmp_path: Path, own_processes: None, own: list[dict[str, Any]]
) -> None:
    """A prompt beyond the engine's own context costs its row alone."""
    rows = generate(
        tmp_path / "out",
        [*ROWS, LONG_ROW],
        engine="vllm",
        record_past_end=3,
        engine_options={"max_model_len": 512, "block_size": 32},
    )
    assert rows == own
    skipped = json.loads((tmp_path / "out" / "answers" / "00000.json").read_text())["skipped"]
    assert [entry["row"] for entry in skipped] == [5]
    assert "(max_model_len 512) leaves room for 485" in skipped[0]["detail"]


def test_what_the_server_refuses_is_a_skipped_row(tmp_path: Path, server: str) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [ROWS[0], LONG_ROW]
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
