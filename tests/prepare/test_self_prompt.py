"""User turns that the target writes itself: the header, the filter, no doubles, resuming."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import paceline
from paceline.answers.engine import LENGTH, STOP, Answer, Prompt, Sampling
from paceline.errors import DataError, TargetError
from tests.prepare import toys
from tests.prepare.toys import chat, chatml_target, write_rows


class Scripted:
    """Says, for each prompt that ends with the user header, the next of the given turns; else
    answers in two bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> None:
        self.describe = {"name": "scripted"}
        self.tokenizer = tokenizer
        self.turns = list(turns)
        self.asked: list[tuple[str, int, Sampling]] = []

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        for prompt in prompts:
            text = self.tokenizer.decode(prompt.ids)
            self.asked.append((text, prompt.seed, sampling))
            said = "ok<|im_end|>"
            if text.endswith("<|im_start|>user\n"):
                number = int(prompt.key.split(".")[0]) * 8 + int(prompt.key.split(".")[1])
                said = self.turns[number % len(self.turns)]
            ids = self.tokenizer(said, add_special_tokens=False)["input_ids"]
            is_whole = ids[-1] in sampling.end_ids
            on_answer(Answer(prompt.key, ids, STOP if is_whole else LENGTH))

    def close(self) -> None:
        pass


TURNS = (
    "What is a lamp?<|im_end|>",
    "what  is a LAMP?<|im_end|>",  # the same again
    "Too long to be ended",
    "Yes.<|im_end|>",  # hardly a turn
    "Say it, say it, say it, say it, say it, say it, again<|im_end|>",  # a loop
    "One <|im_start|> in the middle<|im_end|>",
    "  How do bees fly?\n<|im_end|>",
    "<|im_end|>",
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    template = "<|im_start|>system\nBe good.<|im_end|>\n" + toys.CHATML_PROMPT
    return chatml_target(tmp_path / "target", template)


@pytest.fixture
def scripted(target: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    engine = Scripted(AutoTokenizer.from_pretrained(target), TURNS)
    monkeypatch.setattr("paceline.answers.engine._ENGINES", {"transformers": f"{__name__}:made"})
    monkeypatch.setattr(f"{__name__}.made", lambda options, target: engine, raising=False)
    return engine


def generate(target: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    paceline.generate(target=str(target), out=str(out), max_new_tokens=8, **options)
    return [json.loads(line) for line in (out / "answers/00000.jsonl").open()]


def test_usable_turns_become_prompts_and_are_answered(
    tmp_path: Path, target: Path, scripted: Scripted
) -> None:
    rows = generate(target, tmp_path / "out", self_prompt=2, self_prompt_top_p=0.9)
    assert [row["messages"] for row in rows] == [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        for text in ("What is a lamp?", "How do bees fly?")
    ]
    assert [row["id"] for row in rows] == ["self-0000001", "self-0000002"]
    assert {row["source"] for row in rows} == {"self_prompt"}
    # The target goes on after its own user header, every try with a seed of its own.
    header = "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n"
    tries = [asked for asked in scripted.asked if asked[0].endswith("user\n")]
    assert {text for text, _, _ in tries} == {header}
    assert len({seed for _, seed, _ in tries}) == len(tries) == 8
    sampling = tries[0][2]
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (1.0, 0.9, 80)
    assert scripted.tokenizer.eos_token_id in sampling.end_ids


def test_own_prompts_come_before_the_datas(
    tmp_path: Path, target: Path, scripted: Scripted
) -> None:
    data = [write_rows(tmp_path / "rows.jsonl", [chat("q", id="given")])]
    rows = generate(target, tmp_path / "out", self_prompt=1, data=data)
    assert [row["id"] for row in rows] == ["self-0000001", "given"]


def test_a_target_that_writes_no_usable_turn_is_an_error(
    tmp_path: Path, target: Path, scripted: Scripted
) -> None:
    with pytest.raises(DataError, match="only 2 of 3 user turns came out usable"):
        generate(target, tmp_path / "out", self_prompt=3)


def test_an_interrupted_run_asks_only_for_what_is_missing(
    tmp_path: Path, target: Path, scripted: Scripted
) -> None:
    whole = generate(target, tmp_path / "a", self_prompt=2)
    asked = len(scripted.asked)
    scripted.asked.clear()
    answer = scripted.answer

    def breaks_off(prompts: Sequence[Prompt], *rest: Any) -> None:
        answer(prompts[:5], *rest)
        raise KeyboardInterrupt

    scripted.answer = breaks_off
    with pytest.raises(KeyboardInterrupt):
        generate(target, tmp_path / "b", self_prompt=2)
    scripted.answer = answer
    assert generate(target, tmp_path / "b", self_prompt=2) == whole
    assert len(scripted.asked) == asked
    assert not list((tmp_path / "b").glob("*journal*"))


def test_a_template_without_a_user_header_is_refused(tmp_path: Path, scripted: Scripted) -> None:
    target = chatml_target(tmp_path / "t", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TargetError, match="no header in front of a user turn"):
        generate(target, tmp_path / "out", self_prompt=1)
