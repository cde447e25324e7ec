"""Prompt sets: what is read, how later turns are made, and figures for each set and pooled."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.artefact import open_stage
from paceline.contracts import TokenSample
from paceline.dataset import write_part
from paceline.errors import (
    DataError,
    EvaluationError,
    FingerprintMismatch,
    TargetError,
    UsageError,
)
from paceline.evaluate.prompts import open_questions
from paceline.forms.config_json import Serving
from paceline.forms.write import write_draft
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target, TargetReference
from tests.forms.making import config_for, draft_for
from tests.targets import save_model, save_target, save_tokenizer

QUESTIONS = Path(__file__).parents[2] / "recipes/data/demo_questions.jsonl"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return Target(TargetReference(str(save_target(folder, vocab_size=260))))


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    """A draft of random weights as a server's checkpoint."""
    folder = tmp_path_factory.mktemp("draft")
    config = config_for(
        hidden_size=32, target_hidden_size=32, vocab_size=260, draft_vocab_size=200, head_dim=8
    )
    write_draft(folder, draft_for(target, config), "vllm", target, Serving("float32"))
    return folder


def write_set(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(target, *files, **options):
    return open_questions(EvaluateOptions(prompts=files, mode="decode", **options), target)


def test_the_prompts_that_come_with_paceline_are_read(target):
    asked = questions(target, str(QUESTIONS))
    assert len(asked.chats) == 12
    assert {chat.source for chat in asked.chats} == {"demo_questions"}
    assert sum(len(chat.turns) for chat in asked.chats) == 17
    assert asked.chats[0].name == "demo_questions/1"


def test_a_later_turn_holds_the_answer_before_it(target, tmp_path):
    file = write_set(tmp_path / "chat.jsonl", {"question_id": 7, "turns": ["one", "two", "three"]})
    asked = questions(target, file, system_prompt="Be brief.", max_turns=2)
    (chat,) = asked.chats
    text = lambda ids: target.tokenizer.decode(ids)
    first = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [text(p) for p in chat.prompts] == [first]
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked.take(chat, 0, [*target.tokenizer("fine")["input_ids"], end])
    assert text(chat.prompts[1]) == (
        f"{first}fine<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    # Once made it stays, whoever answers next.
    asked.take(chat, 0, target.tokenizer("other")["input_ids"])
    asked.take(chat, 1, target.tokenizer("more")["input_ids"])
    assert len(chat.prompts) == 2 and "fine" in text(chat.prompts[1])
    assert asked.longest(10) >= len(chat.prompts[1]) + 10


def test_the_longest_request_is_foreseen_before_the_answers_are_there(target, tmp_path):
    file = write_set(tmp_path / "s.jsonl", {"turns": ["a" * 30, "b" * 40, "c" * 5]})
    asked = questions(target, file)
    foreseen = asked.longest(8)
    (chat,) = asked.chats
    for turn in range(2):
        asked.take(chat, turn, target.tokenizer("x" * 8)["input_ids"])
    assert len(chat.prompts) == 3
    assert len(chat.prompts[2]) + 8 <= foreseen < 2 * len(chat.prompts[2])


def test_the_limit_is_of_each_set(target, tmp_path):
    rows = [{"question_id": i, "turns": [f"q{i}"]} for i in range(4)]
    files = [write_set(tmp_path / name / "question.jsonl", *rows) for name in ("a", "b")]
    asked = questions(target, *files, limit=2)
    assert [chat.name for chat in asked.chats] == ["a/0", "a/1", "b/0", "b/1"]
    with pytest.raises(DataError, match="a/. is there more than once"):
        questions(target, files[0], files[0])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "row 2 is not JSON"),
        ('{"question_id": 3}', "row 2 has no `turns`"),
        ('{"turns": []}', "row 2 has no `turns`"),
        ('{"turns": ["a", 3]}', "row 2 has no `turns`"),
        ("[1]", "row 2 has no `turns`"),
        ('{"turns": {"a": "b"}}', "row 2 has no `turns`"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(target, tmp_path, line, says):
    path = tmp_path / "s.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=says):
        questions(target, str(path))


def test_what_cannot_be_asked(target, tmp_path):
    with pytest.raises(UsageError, match=r"no such file.*none\.jsonl"):
        questions(target, str(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(EvaluationError, match="no prompts in there"):
        questions(target, str(empty))
    file = write_set(tmp_path / "s.jsonl", {"turns": ["hello"]})
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    with pytest.raises(EvaluationError, match="s/1.*does not print the user's words"):
        questions(target, file, chat_template=str(silent))
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('no system') }}")
    with pytest.raises(EvaluationError, match="s/1.*no system"):
        questions(target, file, chat_template=str(strict))


def test_a_target_without_a_template_says_so(tmp_path):
    folder = save_tokenizer(save_model(tmp_path / "t", "llama", vocab_size=260), chat_template=None)
    file = write_set(tmp_path / "s.jsonl", {"turns": ["hello"]})
    with pytest.raises(TargetError, match="no chat template"):
        questions(Target(TargetReference(str(folder))), file)


def test_every_answer_of_a_prepared_conversation_is_asked_for(target, tmp_path):
    folder = tmp_path / "data"
    ids = np.arange(10, 22, dtype=np.int32)
    mask = np.zeros(12, bool)
    mask[[3, 4, 8, 9, 10]] = True
    samples = [
        TokenSample("s0", ids, mask, "one", "heldout", "c0"),
        TokenSample("s1", ids, np.zeros(12, bool), "one", "heldout", "c1"),
        TokenSample("s2", ids, mask, "two", "train", "c2"),
    ]
    with open_stage(folder, "prepare", {}, {}) as stage:
        write_part(folder, 0, samples)
        stage.finish({"end_of_turn_ids": [1]}, content="x")
    asked = open_questions(EvaluateOptions(mode="decode", data=str(folder)), target)
    (chat,) = asked.chats
    assert (chat.name, chat.conversation, chat.source) == ("s0", "c0", "one")
    assert chat.prompts == [ids[:3].tolist(), ids[:8].tolist()]
    assert asked.end_ids == {1}


def test_decoding_is_told_for_each_set_and_pooled(target, draft, tmp_path):
    files = [
        write_set(tmp_path / "pairs.jsonl", {"turns": ["red", "blue"]}, {"turns": ["sky", "sea"]}),
        write_set(tmp_path / "single.jsonl", *({"prompt": f"word {i}"} for i in range(3))),
    ]
    out = tmp_path / "out"
    measure = partial(
        paceline.evaluate,
        mode="decode",
        draft=str(draft),
        target=str(target.folder),
        prompts=files,
        num_draft_tokens=[2],
        max_new_tokens=6,
        dtype="float32",
        out=str(out),
    )
    found = measure()
    assert found["lossless"]["equal_outputs"] == found["lossless"]["outputs"] == 2 * 2 + 3
    pooled, sources = (found["results"]["2"][name] for name in ("pooled", "sources"))
    assert sources.keys() == {"pairs", "single"}
    assert pooled["conversations"] == 5
    for name in ("verify_steps", "accepted"):
        assert pooled[name] == sum(part[name] for part in sources.values())
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    answered = {(r["conversation"], r["turn"], r["num_draft_tokens"]): r["ids"] for r in rows}
    assert len(answered) == 2 * (2 * 2 + 3)
    assert answered["pairs/1", 1, 0] == answered["pairs/1", 1, 2]
    counted = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    assert sum(row["verify_steps"] for row in counted) == pooled["verify_steps"]
    # A set that changed is another measurement.
    write_set(tmp_path / "single.jsonl", {"prompt": "other"})
    with pytest.raises(FingerprintMismatch, match=r"answers\.fingerprint\.files"):
        measure()


def test_answers_made_for_later_turns_are_no_comparison(target, draft, tmp_path):
    """The target alone answers all turns but the last, which says nothing of its speed."""
    found = paceline.evaluate(
        mode="decode",
        draft=str(draft),
        target=str(target.folder),
        prompts=[write_set(tmp_path / "pairs.jsonl", {"turns": ["red", "blue"]})],
        num_draft_tokens=[2],
        max_new_tokens=6,
        compare_plain=False,
        dtype="float32",
        out=str(tmp_path / "out"),
    )
    speed = found["speed"]["2"]["1"]
    assert speed["tokens_per_s"] > 0
    assert speed["plain_tokens_per_s"] is None and speed["ratio"] is None
    assert "lossless" not in found


def test_mode_chain_asks_no_prompts_and_says_so():
    with pytest.raises(ValueError, match="prompts: modes decode and served ask them"):
        EvaluateOptions(prompts=["questions.jsonl"], store="store")


def test_mode_served_without_vllm_says_what_to_install(target, draft, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    file = write_set(tmp_path / "s.jsonl", {"turns": ["hello"]})
    with pytest.raises(UsageError, match=r"paceline\[vllm\]"):
        paceline.evaluate(
            mode="served",
            draft=str(draft),
            target=str(target.folder),
            prompts=[file],
            out=str(tmp_path / "out"),
        )
