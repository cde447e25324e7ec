"""Forms of rows, and what happens to odd ones."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import paceline
from tests.prepare import toys
from tests.prepare.toys import Prepared, chat, chatml_target

IDS = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6, 7]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.CHATML_PROMPT)


def test_exact_ids_are_kept_as_they_are(tmp_path: Path, target: Path) -> None:
    row = IDS | {"id": "x", "source": "s", "finished": False}
    [sample] = Prepared(tmp_path, target, [row]).samples
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert (sample.sample_id, sample.conversation_id, sample.source) == ("x", "x", "s")
    assert (sample.finished, sample.num_past_end) == (False, 0)


def test_tokens_past_the_end_are_recorded_but_not_supervised(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, [IDS | {"num_past_end": 2, "finish_reason": "stop"}])
    [sample] = done.samples
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.flatnonzero(sample.loss_mask).tolist() == [3, 4]
    assert (sample.num_past_end, sample.finished) == (2, True)
    assert done.result["past_end_tokens"] == 2


def test_ids_with_a_mask_say_what_was_recorded_past_the_end(tmp_path: Path, target: Path) -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 0, 0]}
    told = [row | {"num_past_end": 2, "finished": True}, row | {"finished": False}]
    samples = Prepared(tmp_path, target, told, deduplicate=False).samples
    assert [(s.num_past_end, s.finished) for s in samples] == [(2, True), (0, False)]


def test_a_cut_takes_the_tokens_past_the_end_first(tmp_path: Path, target: Path) -> None:
    rows = [IDS | {"num_past_end": 2, "finished": True}]
    [sample] = Prepared(tmp_path, target, rows, max_length=6).samples
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert (sample.num_past_end, sample.finished) == (1, True)
    (tmp_path / "shorter").mkdir()
    [sample] = Prepared(tmp_path / "shorter", target, rows, max_length=4).samples
    assert sample.input_ids.tolist() == [1, 2, 3, 4]
    assert (sample.num_past_end, sample.finished) == (0, False)


def test_answers_that_are_the_next_ones_context_are_one_sample(
    tmp_path: Path, target: Path
) -> None:
    answer = lambda prompt, response, past=0: {
        "prompt_ids": prompt,
        "response_ids": response,
        "num_past_end": past,
        "finish_reason": "stop",
    }
    rows = [
        {"id": "joins", "answers": [answer([1, 2], [3]), answer([1, 2, 3, 4], [5, 6])]},
        {"id": "differs", "answers": [answer([1, 2], [3]), answer([1, 9, 3, 4], [5])]},
        {"id": "past", "answers": [answer([1, 2], [3, 8], 1), answer([1, 2, 3, 8, 4], [5])]},
    ]
    done = Prepared(tmp_path, target, rows)
    found = [(s.sample_id, np.flatnonzero(s.loss_mask).tolist()) for s in done.samples]
    assert found == [
        ("joins", [2, 4, 5]),
        ("differs#1", [2]),
        ("differs#2", [4]),
        ("past#1", [2]),
        ("past#2", [5]),
    ]
    assert done.result["split_samples"] == 2
    assert done.result["conversations"] == 3


def test_given_masks_are_kept(tmp_path: Path, target: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [False, False, True]},
        {"input_ids": "[9, 8, 7]", "loss_mask": "[0, 1, 1]"},
    ]
    samples = Prepared(tmp_path, target, rows).samples
    assert [np.flatnonzero(s.loss_mask).tolist() for s in samples] == [[1, 3], [2], [1, 2]]


ODD: list[tuple[Any, str, str]] = [
    ([1, 2], "invalid_json", "a list, not an object"),
    ({}, "missing_key", "it has nothing"),
    ({"text": "x"}, "missing_key", "it has text"),
    ({"messages": "hello"}, "bad_message", "messages is str"),
    ({"messages": [3]}, "bad_message", r"messages\[0\] is int"),
    ({"messages": [{"content": "x"}]}, "unknown_role", r"messages\[0\] has role None"),
    ({"messages": [{"role": "user"}]}, "bad_message", "content is None"),
    ({"messages": [{"role": "user", "content": 3}]}, "bad_message", "content is 3"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "unsupported_part",
        r"content\[0\] is 'image'",
    ),
    (chat("q"), "no_assistant_turn", "no message is the assistant's"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "invalid_text", "messages"),
    (chat("q", "a") | {"id": "x\ud800"}, "invalid_text", r"id is 'x\\ud800'"),
    (chat("q", "a") | {"conversation_id": "\ud800"}, "invalid_text", "conversation_id is"),
    (IDS | {"source": "\ud800x"}, "invalid_text", r"source is '\\ud800x'"),
    ({"text\ud800": "x"}, "missing_key", "it has text\ud800"),
    (IDS | {"response_ids": []}, "no_supervised_tokens", "no token"),
    ({"prompt_ids": [], "response_ids": []}, "empty", "no tokens"),
    ({"prompt_ids": [], "response_ids": [5]}, "no_supervised_tokens", "no token"),
    ({"response_ids": [5]}, "missing_key", "no prompt_ids"),
    (IDS | {"num_past_end": 5}, "bad_field", "num_past_end is 5 of 4"),
    (IDS | {"num_past_end": 4}, "no_supervised_tokens", "no token"),
    (IDS | {"prompt_ids": [1, 9999]}, "bad_ids", r"prompt_ids\[1\] is 9999"),
    (IDS | {"prompt_ids": [-1]}, "bad_ids", r"prompt_ids\[0\] is -1"),
    (IDS | {"prompt_ids": [1.5]}, "bad_ids", "not a list of whole numbers"),
    (IDS | {"prompt_ids": [[1]]}, "bad_ids", "not a list of whole numbers"),
    (IDS | {"prompt_ids": [True, False]}, "bad_ids", "not a list of whole numbers"),
    (IDS | {"prompt_ids": [1, [2]]}, "bad_ids", "not a list of whole numbers"),
    (IDS | {"finished": "yes"}, "bad_field", "finished is 'yes'"),
    (IDS | {"finish_reason": ["stop"]}, "bad_field", r"finish_reason is \['stop'\]"),
    (chat("q", "a") | {"finished": 1}, "bad_field", "finished is 1"),
    (IDS | {"id": ["x"]}, "bad_field", r"id is \['x'\]"),
    (IDS | {"source": 7}, "bad_field", "source is 7"),
    ({"input_ids": [1, 2]}, "missing_key", "no loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "length_mismatch", "1 values for 2"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad_ids", "something else than 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, [1]]}, "bad_ids", "not a list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [[0], [1]]}, "bad_ids", "not a list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, {}]}, "bad_ids", "something else than 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": 7}, "bad_ids", "not a list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "no_supervised_tokens", "no token"),
    (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0], "num_past_end": 2},
        "bad_field",
        "num_past_end is 2; after the last supervised token come 1",
    ),
    (
        {"input_ids": [1, 2], "loss_mask": [0, 1], "num_past_end": "1"},
        "bad_field",
        "num_past_end is '1' of 2 input_ids",
    ),
    ({"answers": "x"}, "bad_field", "answers is not a list"),
    (chat("q" * 60, "a"), "too_long", "max_length is 50"),
    (chat("q", "a") | {"tools": "x"}, "bad_field", "tools is not a list"),
    (
        {"conversations": [{"from": "function_call", "value": "{"}]},
        "bad_tool_call",
        r"conversations\[0\] is not a JSON call",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "bad_tool_call",
        r"messages\[0\]\.tool_calls\[0\] has no function name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "bad_tool_call",
        r"arguments are \[1\], not an object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]},
        "template_error",
        "does not print tool calls",
    ),
]


def test_odd_rows_are_skipped_each_with_its_reason(tmp_path: Path, target: Path) -> None:
    rows = [chat("good", "yes")] + [row for row, _, _ in ODD]
    done = Prepared(tmp_path, target, rows, max_length=50)
    found = [(entry["row"], entry["reason"]) for entry in done.skipped]
    assert found == [(i, reason) for i, (_, reason, _) in enumerate(ODD, start=2)]
    for entry, (_, _, detail) in zip(done.skipped, ODD, strict=True):
        assert re.search(detail, entry["detail"]), entry
    assert done.result["rows"] == len(rows)
    assert done.result["rows_kept"] == 1
    assert sum(done.result["skipped"].values()) == len(ODD)
    assert done.decoded_spans() == ["yes<|im_end|>"]


def test_ids_beyond_the_logits_cost_their_row_alone(tmp_path: Path) -> None:
    tokenizer = toys.toy_tokenizer(toys.CHATML_PROMPT)
    target = toys.toy_target(tmp_path / "t", tokenizer, num_padding=-1)
    rows = [chat("q", "a"), chat("</think>", "a"), chat("q", "b</think>")]
    done = Prepared(tmp_path, target, rows)
    assert [(entry["row"], entry["reason"]) for entry in done.skipped] == [
        (2, "bad_ids"),
        (3, "bad_ids"),
    ]
    last = len(tokenizer) - 1
    told = f"the tokenizer gives id {last}; the target's logits have ids 0 to {last - 1}"
    assert {entry["detail"] for entry in done.skipped} == {told}
    assert done.decoded_spans() == ["a<|im_end|>"]


def test_tables_with_more_than_json_in_their_messages(tmp_path: Path, target: Path) -> None:
    more = [{}, {"at": datetime(2023, 4, 9, tzinfo=UTC)}, {"image": b"x"}]
    rows = [chat(f"q{i}", "a") for i in range(3)]
    for row, fields in zip(rows, more, strict=True):
        row["messages"][0] |= fields
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("image", pa.binary()),
        ]
    )
    table = pa.Table.from_pylist(rows, pa.schema([("messages", pa.list_(message))]))
    pq.write_table(table, tmp_path / "rows.parquet")
    result = paceline.prepare(
        target=str(target),
        data=[str(tmp_path / "rows.parquet")],
        out=str(tmp_path / "out"),
        max_skipped_share=1.0,
    )
    assert (result["rows_kept"], result["skipped"]) == (2, {"bad_field": 1})


def test_legal_orders_of_roles_are_kept(tmp_path: Path, target: Path) -> None:
    orders = ("uaua", "suua", "uaa", "auua", "sua", "utta", "dua")
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "d": "developer"}
    rows = [
        {"messages": [{"role": roles[c], "content": f"{c}{i}"} for i, c in enumerate(order)]}
        for order in orders
    ]
    done = Prepared(tmp_path, target, rows)
    assert len(done.samples) == len(orders)
    for number, order in enumerate(orders):
        wanted = [f"a{i}<|im_end|>" for i, c in enumerate(order) if c == "a"]
        assert done.decoded_spans(number) == wanted


def test_turns_after_the_last_answer_are_dropped_and_counted(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, [chat("u1", "a1", "u2")])
    assert "u2" not in done.text()
    assert done.decoded_spans() == ["a1<|im_end|>"]
    assert done.result["notes"] == {"trailing_turns_dropped": 1}


def test_empty_answers_teach_their_end_alone(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, [chat("u1", "", "u2", "a2")])
    assert done.decoded_spans() == ["<|im_end|>", "a2<|im_end|>"]


def test_fields_that_are_null_are_not_there(tmp_path: Path, target: Path) -> None:
    names = ("id", "conversation_id", "source", "split", "answers", "prompt_ids", "response_ids")
    more = ("input_ids", "loss_mask", "tools", "system", "finished", "finish_reason")
    null = dict.fromkeys([*names, *more])
    answer = IDS | {"num_past_end": None, "finish_reason": None}
    rows = [
        null | chat("q", "a"),
        {"messages": None} | IDS,
        null | {"messages": None, "conversations": [{"from": "gpt", "value": "b"}]},
        {"messages": None, "answers": [answer | {"response_ids": [9, 8]}]},
    ]
    done = Prepared(tmp_path, target, rows)
    assert done.skipped == []
    assert done.decoded_spans(0) == ["a<|im_end|>"]
    assert done.samples[1].input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert done.decoded_spans(2) == ["b<|im_end|>"]
    assert done.samples[3].input_ids.tolist() == [1, 2, 3, 9, 8]


@pytest.mark.parametrize("as_array", [False, True])
def test_values_that_are_nested_deeply_cost_their_row_alone(
    tmp_path: Path, target: Path, as_array: bool
) -> None:
    """Whatever reads, weighs, hashes or prints them gives up at another depth."""
    deep = lambda depth: "[" * depth + "]" * depth
    call = '{"name": "f", "arguments": {"a": %s}}'
    rows = [json.dumps(chat("q", "a"))]
    # An array in which anything is too deep for the parser is an error of its file.
    for depth in (100, 400, 700) if as_array else (100, 400, *range(700, 980, 20), 10_000):
        rows.append(f'{{"messages": [{{"role": "user", "content": "q", "more": {deep(depth)}}}]}}')
        rows.append(f'{{"other": {deep(depth)}}}')
        rows.append(f'{{"messages": "{deep(50 * depth)}"}}')
        rows.append(f'{{"input_ids": {deep(depth)}, "loss_mask": [1]}}')
        said = {"from": "function_call", "value": call % deep(50 * depth)}
        rows.append(json.dumps({"conversations": [said]}))
    data = tmp_path / "deep.jsonl"
    data.write_text(f"[{','.join(rows)}]" if as_array else "\n".join(rows))
    result = paceline.prepare(
        target=str(target), data=[str(data)], out=str(tmp_path / "out"), max_skipped_share=1.0
    )
    assert result["rows_kept"] == 1
    assert sum(result["skipped"].values()) == result["rows"] - 1 == len(rows) - 1


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (toys.CHATML_PROMPT, [["a1<|im_end|>", "half"]]),
        (toys.CHATML_GEN, [["a1<|im_end|>", "half"]]),
        (toys.THINK_STRIP, [["a1<|im_end|>", "half"]]),
    ],
)
@pytest.mark.parametrize("told", [{"finished": False}, {"finish_reason": "length"}])
def test_a_cut_answer_told_by_words_has_no_end(
    tmp_path: Path, template: str, wanted: list[list[str]], told: dict[str, Any]
) -> None:
    target = chatml_target(tmp_path / "t", template)
    done = Prepared(tmp_path, target, [chat("u1", "a1", "u2", "half") | told])
    assert [done.decoded_spans(i) for i in range(len(done.samples))] == wanted
    assert [sample.finished for sample in done.samples] == [False]
    assert done.result["unfinished"] == 1


def test_the_cut_answer_of_a_split_conversation_is_its_last(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.THINK_STRIP)
    row = chat("u1", "<think>r</think>a1", "u2", "half", finished=False)
    done = Prepared(tmp_path, target, [row])
    assert done.decoded_spans(0) == ["<think>r</think>a1<|im_end|>"]
    assert done.decoded_spans(1) == ["half"]
    assert [sample.finished for sample in done.samples] == [None, False]


def test_a_cut_answer_without_words_teaches_nothing(tmp_path: Path, target: Path) -> None:
    rows = [chat("u", "", finished=False), chat("u1", "a1", "u2", "", finished=False)]
    done = Prepared(tmp_path, target, rows)
    assert [entry["reason"] for entry in done.skipped] == ["empty_answer"]
    assert done.decoded_spans() == ["a1<|im_end|>"]


@pytest.mark.parametrize(
    ("told", "finished"),
    [
        ({}, None),
        ({"finish_reason": None}, None),
        ({"finish_reason": "as nobody says"}, None),
        ({"finish_reason": "stop"}, True),
        ({"finish_reason": "eos"}, True),
        ({"finish_reason": "tool_calls"}, True),
        ({"finish_reason": "length"}, False),
        ({"finish_reason": "max_tokens"}, False),
        ({"finish_reason": "content_filter"}, False),
        ({"finish_reason": "error"}, False),
        ({"finish_reason": "repetition"}, False),
        ({"finish_reason": "length", "finished": True}, True),
        ({"finish_reason": "length", "finished": None}, False),
    ],
)
def test_whether_an_answer_ended_by_itself(
    tmp_path: Path, target: Path, told: dict[str, Any], finished: bool | None
) -> None:
    done = Prepared(tmp_path, target, [IDS | told, chat("q", "a") | told])
    assert [sample.finished for sample in done.samples] == [finished, finished]
    assert done.decoded_spans(1) == ["a" if finished is False else "a<|im_end|>"]


def test_what_a_cut_leaves_says_whether_it_is_whole(tmp_path: Path, target: Path) -> None:
    row = {"input_ids": list(range(1, 9)), "loss_mask": [0, 0, 1, 1, 0, 1, 1, 0], "finished": True}
    found = {}
    for length in (8, 7, 6, 5, 4):
        done = Prepared(tmp_path, target, [row], max_length=length, overwrite=True)
        found[length] = (done.samples[0].num_tokens, done.samples[0].finished)
    assert found == {8: (8, True), 7: (7, True), 6: (4, None), 5: (5, None), 4: (4, None)}
    broken = row | {"loss_mask": [0, 0, 1, 1, 1, 1, 1, 0]}
    [sample] = Prepared(tmp_path, target, [broken], max_length=5, overwrite=True).samples
    assert (sample.num_tokens, sample.finished) == (5, False)


def test_columns_that_hold_json_text(tmp_path: Path, target: Path) -> None:
    row = {"messages": json.dumps(chat("q", "a")["messages"]), "system": "Be brief."}
    done = Prepared(tmp_path, target, [row])
    assert done.text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq")


def test_whole_numbers_that_a_table_made_floats_are_ids(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"q{i}", "a", id=float(i), conversation_id=float(i // 2)) for i in range(4)]
    done = Prepared(tmp_path, target, rows)
    assert [s.sample_id for s in done.samples] == ["0", "1", "2", "3"]
    assert [s.conversation_id for s in done.samples] == ["0", "0", "1", "1"]


def test_sharegpt_calls_of_functions(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_ITEMS)
    turns = [
        {"from": "human", "value": "3*18"},
        {"from": "function_call", "value": '{"name": "mul", "arguments": {"a": 3}}'},
        {"from": "observation", "value": "54"},
        {"from": "gpt", "value": "It is 54."},
    ]
    done = Prepared(tmp_path, target, [{"conversations": turns}])
    assert done.decoded_spans() == ["[call mul a=3]<|im_end|>", "It is 54.<|im_end|>"]


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_by_their_other_names_are_not_lost(tmp_path: Path, name: str) -> None:
    """Llama 3.1 writes `parameters`, other makers' logs the rest."""
    target = chatml_target(tmp_path / "t", toys.TOOLS_ITEMS)
    call = {"name": "mul", name: {"a": 3}}
    messages = [
        {"role": "user", "content": "3*18"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    turns = [
        {"from": "human", "value": "4*18"},
        {"from": "function_call", "value": json.dumps(call)},
    ]
    done = Prepared(tmp_path, target, [{"messages": messages}, {"conversations": turns}])
    for number in (0, 1):
        assert done.decoded_spans(number) == ["[call mul a=3]<|im_end|>"]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_call_in_the_apis_older_form_is_one_call(tmp_path: Path, as_text: bool) -> None:
    target = chatml_target(tmp_path / "t", toys.TOOLS_ITEMS)
    call = {"name": "mul", "arguments": '{"a": 3}'}
    messages = [
        {"role": "user", "content": "3*18"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "mul", "content": "54"},
        {"role": "assistant", "content": "It is 54.", "tool_calls": [], "function_call": None},
    ]
    if as_text:
        messages[1]["function_call"] = json.dumps(call)
    done = Prepared(tmp_path, target, [{"messages": messages}])
    assert done.decoded_spans() == ["[call mul a=3]<|im_end|>", "It is 54.<|im_end|>"]
