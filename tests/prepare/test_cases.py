"""The field's cases of the data stage, each with the value that is right."""

import json
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.errors import DataError
from tests.prepare import toys
from tests.prepare.toys import Prepared, chat, chatml_target, write_rows


def test_D01_empty_and_malformed_rows_are_skipped_with_a_reason_each(tmp_path: Path) -> None:
    rows = [
        {"id": "r0", "messages": []},
        {"id": "r1", "messages": [{"role": "system", "content": "Be brief."}]},
        {"id": "r2", "messages": [{"role": "assistant", "content": "Hi"}]},
        chat("1+1?", "2", id="r3"),
        {"id": "r4"},
    ]
    done = Prepared(tmp_path, chatml_target(tmp_path / "t", toys.CHATML_GEN), rows)
    # The documented policy for an answer that comes first: it is kept.
    assert [sample.sample_id for sample in done.samples] == ["r2", "r3"]
    assert done.decoded_spans(0) == ["Hi<|im_end|>"]
    assert done.decoded_spans(1) == ["2<|im_end|>"]
    assert [(s["id"], s["row"], s["reason"]) for s in done.skipped] == [
        ("r0", 1, "empty"),
        ("r1", 2, "no_assistant_turn"),
        ("r4", 5, "missing_key"),
    ]
    assert done.result["rows"] == 5
    assert done.result["rows_kept"] + sum(done.result["skipped"].values()) == 5


BAD_ROLES = {
    "id": "bad",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ],
}


def test_D03_a_row_that_the_template_refuses_is_reported_and_skipped(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.STRICT)
    done = Prepared(tmp_path, target, [chat("a", "b", id="ok"), BAD_ROLES])
    assert [sample.sample_id for sample in done.samples] == ["ok"]
    [skipped] = done.skipped
    assert (skipped["id"], skipped["row"], skipped["reason"]) == ("bad", 2, "template_error")
    assert "roles must alternate" in skipped["detail"]


def test_D03_strict_fails_and_names_the_row(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.STRICT)
    with pytest.raises(DataError, match=r"row 2 \(id bad\).*roles must alternate"):
        Prepared(tmp_path, target, [chat("a", "b", id="ok"), BAD_ROLES], strict=True)


def test_D03_all_rows_bad_fails_and_leaves_no_finished_folder(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.STRICT)
    with pytest.raises(DataError, match="none of the 1 rows can be used"):
        Prepared(tmp_path, target, [BAD_ROLES], max_skipped_share=1.0)
    manifest = json.loads((tmp_path / "prepared" / "manifest.json").read_text())
    assert manifest["status"] == "running"
    assert "roles must alternate" in (tmp_path / "prepared" / "skipped.jsonl").read_text()


def test_D03_more_skipped_than_the_limit_fails(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.STRICT)
    with pytest.raises(DataError, match="1 of 2 rows had to be skipped"):
        Prepared(tmp_path, target, [chat("a", "b"), BAD_ROLES], max_skipped_share=0.4)


def test_D04_sharegpt_and_messages_give_the_same(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    sharegpt = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}
    done = Prepared(tmp_path, target, [sharegpt, chat("Q", "A")], deduplicate=False)
    first, second = done.samples
    for sample in (first, second):
        assert sample.num_tokens == 23
        assert sample.num_supervised == 2
    assert np.array_equal(first.input_ids, second.input_ids)
    assert np.array_equal(first.loss_mask, second.loss_mask)
    assert done.decoded_spans(0) == ["A<|im_end|>"]


@pytest.mark.parametrize(
    ("user", "assistant"),
    [
        ("human", "gpt"),
        ("user", "assistant"),
        ("prompter", "bot"),
        ("Human", "model"),
        ("user", "chatgpt"),
    ],
)
def test_D04_role_aliases(tmp_path: Path, user: str, assistant: str) -> None:
    turns = [
        {"from": "system", "value": "S"},
        {"from": user, "value": "Q"},
        {"from": assistant, "value": "A"},
        {"from": "observation", "value": "O"},
        {"from": assistant, "value": "B"},
    ]
    target = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    done = Prepared(tmp_path, target, [{"conversations": turns}])
    assert done.decoded_spans() == ["A<|im_end|>", "B<|im_end|>"]
    assert "<|im_start|>tool\nO" in done.text()
    assert "<|im_start|>user\nQ" in done.text()


def test_D04_an_unknown_role_is_named(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "narrator", "value": "Q"}]}, chat("Q", "A")]
    done = Prepared(tmp_path, chatml_target(tmp_path / "t", toys.CHATML_GEN), rows)
    [skipped] = done.skipped
    assert skipped["reason"] == "unknown_role"
    assert "'narrator'" in skipped["detail"]


def tool_row(arguments: object) -> dict:
    call = {"type": "function", "function": {"name": "mul", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "3*18"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    }


@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 18}', {"a": 3, "b": 18}])
def test_D06_a_template_that_walks_over_arguments(tmp_path: Path, arguments: object) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_ITEMS)
    done = Prepared(tmp_path, target, [tool_row(arguments)])
    assert done.decoded_spans() == ["[call mul a=3 b=18]<|im_end|>"]


@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 18}', {"a": 3, "b": 18}])
def test_D06_a_template_that_wants_text(tmp_path: Path, arguments: object) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_TEXT)
    done = Prepared(tmp_path, target, [tool_row(arguments)])
    assert done.decoded_spans() == ['[call mul {"a": 3, "b": 18}]<|im_end|>']


@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 18}', {"a": 3, "b": 18}])
def test_D06_arguments_are_never_encoded_twice(tmp_path: Path, arguments: object) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_JSON)
    done = Prepared(tmp_path, target, [tool_row(arguments)])
    assert done.decoded_spans() == ['[call mul {"a": 3, "b": 18}]<|im_end|>']


@pytest.mark.parametrize("template", [toys.TOOLS_ITEMS, toys.TOOLS_TEXT])
def test_D06_cut_off_json_is_an_error_of_the_row(tmp_path: Path, template: str) -> None:
    target = chatml_target(tmp_path / "t", template)
    done = Prepared(tmp_path, target, [tool_row('{"a": 3'), chat("Q", "A")])
    [skipped] = done.skipped
    assert (skipped["row"], skipped["reason"]) == (1, "bad_tool_call")
    assert "messages[1].tool_calls[0]" in skipped["detail"]


def test_D07_a_template_without_markers_is_never_all_zero(tmp_path: Path) -> None:
    done = Prepared(tmp_path, chatml_target(tmp_path / "t", toys.CHATML), [chat("hi", "yo")])
    assert done.samples[0].num_supervised == 3
    assert done.decoded_spans() == ["yo<|im_end|>"]
    assert done.result["supervised_tokens"] == 3
    assert done.result["tokens"] == done.samples[0].num_tokens
    assert done.result["mask_method"] == "rendered_prefix"


def test_D07_nothing_supervised_fails(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.CHATML)
    with pytest.raises(DataError, match="no_supervised_tokens"):
        Prepared(tmp_path, target, [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])


def test_D09_truncation_inside_an_answer_keeps_what_is_left_of_it(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    whole = Prepared(tmp_path, target, [chat("hi", "abcdef")]).samples[0]
    assert (whole.num_tokens, whole.num_supervised) == (29, 7)
    assert int(whole.loss_mask.argmax()) == 21
    (tmp_path / "cut").mkdir()
    done = Prepared(tmp_path / "cut", target, [chat("hi", "abcdef")], max_length=24)
    cut = done.samples[0]
    assert len(cut.input_ids) == len(cut.loss_mask) == 24
    assert np.flatnonzero(cut.loss_mask).tolist() == [21, 22, 23]
    assert done.decoded_spans() == ["abc"]
    assert done.result["cut"] == 1
    assert done.result["cut_supervised_tokens"] == 4


def test_D12_thinking_stripped_from_history_splits_the_conversation(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.THINK_STRIP)
    row = chat("u1", "<think>rr</think>A1", "u2", "<think>s</think>A2", id="c")
    done = Prepared(tmp_path, target, [row])
    first, second = done.samples
    assert done.text(0) == (
        "<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\n<think>rr</think>A1<|im_end|>\n"
    )
    assert done.decoded_spans(0) == ["<think>rr</think>A1<|im_end|>"]
    assert done.text(1).count("<think>") == 1
    assert np.flatnonzero(second.loss_mask).tolist() == [46, 47, 48, 49, 50, 51]
    assert done.decoded_spans(1) == ["<think>s</think>A2<|im_end|>"]
    assert done.result["split_samples"] == 1
    assert done.result["samples"] == 2
    assert done.result["conversations"] == 1
    assert [first.sample_id, second.sample_id] == ["c#1", "c#2"]
    assert first.conversation_id == second.conversation_id == "c"


@pytest.mark.parametrize("template", [toys.BOS_CHATML, toys.CHATML])
def test_D14_exactly_one_begin_token(tmp_path: Path, template: str) -> None:
    target = chatml_target(tmp_path / "t", template, adds_bos=True)
    done = Prepared(tmp_path, target, [chat("hi", "yo")])
    sample = done.samples[0]
    bos = done.tokenizer.bos_token_id
    assert sample.input_ids[0] == bos
    assert sample.input_ids.tolist().count(bos) == 1
    rendered = done.tokenizer.apply_chat_template(chat("hi", "yo")["messages"], tokenize=False)
    one_step = done.tokenizer(rendered, add_special_tokens=not rendered.startswith("<bos>"))
    assert sample.input_ids.tolist() == one_step["input_ids"]
    assert len(sample.loss_mask) == len(sample.input_ids)
    assert done.decoded_spans() == ["yo<|im_end|>"]


def test_D17_characters_of_several_tokens(tmp_path: Path) -> None:
    answer = "i \u2b62 j \U0001f469\u200d\U0001f4bb"
    assert (len(answer), len(answer.encode())) == (9, 19)
    target = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    done = Prepared(tmp_path, target, [chat("\u00e9", answer)])
    sample = done.samples[0]
    assert sample.num_supervised == 20
    assert done.decoded_spans() == [answer + "<|im_end|>"]
    # The newline after the end marker and all of the user's turn stay out.
    assert not sample.loss_mask[-1]
    assert not sample.loss_mask[: int(sample.loss_mask.argmax())].any()


def test_D17_a_line_separator_inside_a_string_is_no_line_end(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    data = tmp_path / "rows.jsonl"
    write_rows(data, [chat("a\u2028b", "c\u2029d\x85e")])
    assert "\u2028" in data.read_text()  # unescaped in the file
    paceline.prepare(target=str(target), data=[str(data)], out=str(tmp_path / "out"))
    done = Prepared(tmp_path, target, [chat("a\u2028b", "c\u2029d\x85e")])
    assert done.decoded_spans() == ["c\u2029d\x85e<|im_end|>"]
    assert done.result["rows"] == 1
