"""Answers beyond `max_length` are left out as if all had been tokenised, and cost little."""

from pathlib import Path

import pytest

from paceline.prepare import late
from paceline.prepare.tokens import TextTokenizer
from tests.prepare import toys
from tests.prepare.toys import Prepared, chat, chatml_target

TURNS = [
    text
    for i in range(60)
    for text in (
        f"question {i} " * (i % 5 + 1),
        f"<think>why {i}</think>answer {i} " + "x" * (i % 7),
    )
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.THINK_STRIP)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of every text that went to the tokenizer."""
    counts: list[int] = []
    encode = TextTokenizer.encode

    def counting(self, texts):
        counts.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode", counting)
    return counts


@pytest.mark.parametrize("max_length", [28, 300, 301, 302, 900])
def test_the_same_samples_and_counts_as_without_a_look_ahead(
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenised: list[int],
    max_length: int,
) -> None:
    rows = [chat(*TURNS), chat("short", "one")]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = Prepared(tmp_path / "a", target, rows, max_length=max_length)
    with_look_ahead = sum(tokenised)
    tokenised.clear()
    monkeypatch.setattr(late, "_FEWEST", len(TURNS))
    plain = Prepared(tmp_path / "b", target, rows, max_length=max_length)
    assert with_look_ahead < 0.6 * sum(tokenised)
    # Skipped rows are listed with the file that they are in, which is another one.
    for told in (found.result, plain.result):
        del told["side_files"]["skipped.jsonl"]
    assert found.result == plain.result
    assert [s["detail"] for s in found.skipped] == [s["detail"] for s in plain.skipped]
    assert [(s.sample_id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in found.samples] == [
        (s.sample_id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in plain.samples
    ]


def test_what_is_tokenised_grows_with_the_conversation_and_not_with_its_square(
    tmp_path: Path, target: Path, tokenised: list[int]
) -> None:
    totals = []
    for times in (1, 2, 4):
        folder = tmp_path / str(times)
        folder.mkdir()
        Prepared(folder, target, [chat(*TURNS * times)], max_length=200)
        totals.append(sum(tokenised))
        tokenised.clear()
    assert totals[2] - totals[1] < 2.2 * (totals[1] - totals[0])
