"""evaluate through real vLLM: its counters are the server-free walk, its outputs the target's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.evaluate.run import CONVERSATIONS_FILE
from paceline.evaluate.served_http import RunningServer
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target
from tests.conftest import RealRun
from tests.engines.api_server import api_server

pytestmark = pytest.mark.engine_vllm

K = 3
NUM_CHATS = 24
ASKED = 6


@pytest.fixture(scope="module")
def exported(real_run: RealRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    paceline.export(draft=str(real_run.draft), out=str(folder / "out"), dtype="float32")
    return folder / "out" / "vllm"


@pytest.fixture(scope="module")
def walked(real_run: RealRun, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server-free walk over answers of transformers, in float32."""
    folder = tmp_path_factory.mktemp("chain") / "out"
    paceline.evaluate(
        draft=str(exported),
        target=target_of(real_run),
        store=str(real_run.store),
        out=str(folder),
        split="train",
        num_draft_tokens=[K],
        dtype="float32",
    )
    return folder


def target_of(run: RealRun) -> str:
    manifest = json.loads((run.prepare / "manifest.json").read_text())
    return manifest["result"]["target"]["target"]


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def counts_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    rows = map(json.loads, (folder / CONVERSATIONS_FILE).read_text().splitlines())
    return {
        r["conversation"]: (r["verify_steps"], r["accepted"], tuple(r["per_position"]))
        for r in rows
    }


def test_vllms_own_counters_are_the_server_free_walk(
    real_run: RealRun, exported: Path, walked: Path, tmp_path: Path, own_processes: None
) -> None:
    served = paceline.evaluate(
        mode="served",
        draft=str(exported),
        target=target_of(real_run),
        data=str(real_run.prepare),
        out=str(tmp_path / "served"),
        split="train",
        num_draft_tokens=[K],
        max_new_tokens=12,
        batch_sizes=[1, 8],
        dtype="float32",
    )
    assert served["lossless"] == {
        "equal_outputs": NUM_CHATS,
        "outputs": NUM_CHATS,
        "near_ties": 0,
        "differences": [],
    }
    assert len(counts_of(walked)) == NUM_CHATS
    assert counts_of(tmp_path / "served") == counts_of(walked)
    found, expected = (r["results"][str(K)] for r in (served, result_of(walked)))
    assert found["sources"].keys() == expected["sources"].keys() == {"s0", "s1"}
    for name in ("acceptance_length", "per_position", "verify_steps", "accepted"):
        assert found["pooled"][name] == expected["pooled"][name]
        for source in found["sources"]:
            assert found["sources"][source][name] == expected["sources"][source][name]
    # Trained on these very answers: there is something to compare.
    assert found["pooled"]["acceptance_length"] > 1.3
    assert served["short_drafts"] == {}
    for speed in (served["speed"][str(K)]["1"], served["speed"][str(K)]["8"]):
        assert speed["ratio"] == speed["tokens_per_s"] / speed["plain_tokens_per_s"] > 0


@pytest.fixture(scope="module")
def server(
    target: Target, exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    speculative = {"method": "eagle3", "model": str(exported), "num_speculative_tokens": K}
    more = ["--speculative-config", json.dumps(speculative)]
    with api_server(target, tmp_path_factory.mktemp("serve"), more) as url:
        yield url


def test_a_server_that_runs_is_measured_by_its_metrics(
    server: str, target: Target, real_run: RealRun, walked: Path, tmp_path: Path
) -> None:
    options = {"mode": "served", "split": "train", "max_new_tokens": 12, "dtype": "float32"}
    served = paceline.evaluate(
        server=server,
        data=str(real_run.prepare),
        out=str(tmp_path / "served"),
        limit=ASKED,
        **options,
    )
    # K is what the server says, not what the options would have it.
    assert list(served["results"]) == [str(K)]
    counted, expected = counts_of(tmp_path / "served"), counts_of(walked)
    assert len(counted) == ASKED
    assert counted == {name: expected[name] for name in counted}
    assert "lossless" not in served and served["speed"][str(K)]["1"]["ratio"] is None

    running = RunningServer(server, EvaluateOptions(**options), target.end_of_turn_ids)
    generated = running.counters().generated
    assert running.counters(generated).generated == generated > ASKED
    prompt = target.tokenizer("The capital of France is")["input_ids"]
    (first,) = running.answer([prompt], 1)
    other = next(i for i in range(9, 99) if i != first[0])
    gap = running.gap(prompt, first[0], first[0])
    assert gap == 0.0
    assert running.gap(prompt, first[0], other) in (None, pytest.approx(10, abs=10))
    running.close()
