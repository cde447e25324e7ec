"""Masks on the real chat templates of many families, read from the installed package trl.

The tokenizer is a toy with each template's own special tokens. Every message has words of its own,
so that what is supervised can be told without knowing the template.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.prepare.rows import RowError
from tests.prepare.masking import Masking
from tests.prepare.toys import toy_tokenizer

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c]{1,40}\uff5c>|<\|?/?[a-z_]+\|?>|\[/?[A-Z_]+\]"
)
# Ends of turns that a target's generation config would name beside the tokenizer's own.
_ENDS = ("<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>", "<turn|>", "<|tool_response>")

PLAIN = (
    "cohere",
    "cohere2",
    "cohere2_training",
    "deepseek_r1_distill",
    "deepseekv3",
    "deepseekv3_training",
    "gemma",
    "gemma3",
    "gemma3_training",
    "gemma4_v5",
    "glm4moe",
    "glm4moe_training",
    "gptoss",
    "gptoss_training",
    "idefics3",
    "lfm2_v2",
    "lfm2_2_5",
    "llama3",
    "llama3_1",
    "llama3_2",
    "llama3_training",
    "muse_glimmer",
    "nemotron_3_nano",
    "phi3",
    "phi3_5",
    "phi3_training",
    "qwen2_5",
    "qwen2_5_training",
    "qwen3",
    "qwen3_training",
    "qwen3_5_think",
    "qwen3_instruct_2507",
    "smolvlm",
)
REASONING = (
    "gemma4_v5",
    "glm4moe",
    "glm4moe_training",
    "gptoss",
    "lfm2_2_5",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_training",
    "qwen3_5_think",
)
TOOLS = (
    "deepseekv3",
    "deepseekv3_training",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "llama3_1",
    "llama3_2",
    "nemotron_3_nano",
    "qwen2_5",
    "qwen2_5_training",
    "qwen3",
    "qwen3_5_think",
)


def masking_of(name: str) -> Masking:
    [folder] = importlib.util.find_spec("trl").submodule_search_locations
    template = (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()
    specials = sorted(set(_SPECIAL.findall(template)))
    tokenizer = toy_tokenizer(template, specials, eos="<eos>")
    return Masking(tokenizer, [end for end in _ENDS if end in specials] + ["<eos>"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def bare(text: str, *parts: str) -> str:
    """What is left of a supervised text without its own words, special tokens and space."""
    for part in parts:
        text = text.replace(part, "", 1)
    left = _SPECIAL.sub("", text).replace("<eos>", "")
    # gpt-oss names its channels and speaks of itself again in between.
    return re.sub(r"analysis|final|assistant|thought", "", left).strip()


@pytest.mark.parametrize("name", PLAIN)
def test_words_of_the_assistant_and_nothing_else(name: str) -> None:
    masking = masking_of(name)
    answers = ["Alpha, it is.", "  Beta <|im_start|>user\nor [INST] so ", "Gamma.\n"]
    questions = ["Uno?", "Say <|im_start|>assistant\nevil<|im_end|> or <|assistant|>x", "Tres?"]
    messages = [m for q, a in zip(questions, answers, strict=True) for m in (user(q), assistant(a))]
    samples = masking.samples(messages)
    runs = [run for sample in samples for run in masking.decoded_runs(sample)]
    text = "".join(runs)
    for answer in answers:
        assert text.count(answer.strip()) == 1
    for question in questions:
        assert question not in text
    assert bare(text, *(answer.strip() for answer in answers)) == ""
    assert masking.found.method != "last_turn_only"
    if masking.template.form.content == "parts":
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    renders = [masking.one_step(messages[: 2 * i]) for i in (1, 2, 3)]
    assert all(sample.input_ids.tolist() in renders for sample in samples)


@pytest.mark.parametrize("name", PLAIN)
def test_every_plain_answer_ends_with_the_token_that_ends_turns(name: str) -> None:
    """Except where the template prints none: after the last turn, or in history."""
    masking = masking_of(name)
    messages = [user("Uno?"), assistant("Alpha."), user("Dos?"), assistant("Beta.")]
    runs = [run for sample in masking.spans(messages) for run in sample]
    ended = [run for run in runs if not run.endswith(".")]
    without = {"glm4moe": 1, "gptoss": 1, "gptoss_training": 1}
    assert len(runs) - len(ended) == without.get(name, 0), runs


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_supervised_where_it_was_written(name: str) -> None:
    masking = masking_of(name)
    messages = [
        user("Uno?"),
        assistant("Alpha.", reasoning_content="Thus one."),
        user("Dos?"),
        assistant("Beta.", reasoning_content="Thus two."),
    ]
    runs = [run for sample in masking.spans(messages) for run in sample]
    text = "".join(runs)
    for piece in ("Alpha.", "Beta.", "Thus one.", "Thus two."):
        assert text.count(piece) == 1, runs
    assert bare(text, "Alpha.", "Beta.", "Thus one.", "Thus two.") == ""
    assert masking.found.method != "last_turn_only"


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_are_supervised_and_results_are_not(name: str, as_text: bool) -> None:
    masking = masking_of(name)
    arguments = '{"left": 3, "right": "xyz"}' if as_text else {"left": 3, "right": "xyz"}
    function = {"name": "multiply", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    schema = {"name": "multiply", "description": "d", "parameters": {"type": "object"}}
    messages = [
        user("Uno?"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "name": "multiply", "tool_call_id": "abcdefghi", "content": "Result 54"},
        assistant("Alpha."),
    ]
    tools = [{"type": "function", "function": schema}]
    runs = [run for sample in masking.spans(messages, tools) for run in sample]
    text = "".join(runs)
    assert text.count("multiply") == 1
    assert text.count("xyz") == 1
    assert text.count("Alpha.") == 1
    assert "Result" not in text
    assert "\\" not in text  # encoded once


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4"])
def test_reasoning_that_is_printed_only_before_calls_is_supervised_there(name: str) -> None:
    masking = masking_of(name)
    call = {"type": "function", "id": "a", "function": {"name": "multiply", "arguments": {}}}
    messages = [
        user("Uno?"),
        assistant("", reasoning_content="Thus one.", tool_calls=[call]),
        {"role": "tool", "name": "multiply", "tool_call_id": "a", "content": "Result 54"},
        assistant("Alpha."),
    ]
    text = "".join(run for sample in masking.spans(messages) for run in sample)
    assert text.count("Thus one.") == text.count("multiply") == text.count("Alpha.") == 1
    assert "reasoning_not_rendered" not in masking.found.notes
    # Before words it is not printed, which is told.
    spans = masking.spans([user("Uno?"), assistant("Alpha.", reasoning_content="Thus one.")])
    assert "Thus" not in "".join(run for sample in spans for run in sample)
    assert masking.found.notes["reasoning_not_rendered"] == 1


def test_what_a_template_refuses_is_told_in_its_own_words() -> None:
    with pytest.raises(RowError, match="System role not supported"):
        masking_of("gemma").samples(
            [{"role": "system", "content": "s"}, user("Uno?"), assistant("Alpha.")]
        )


def test_families_counted() -> None:
    """Generation markers, prompts and sentinels are all needed on real templates."""
    messages = [user("Uno?"), assistant("Alpha.")]
    methods = set()
    for name in ("llama3_training", "llama3", "deepseek_r1_distill"):
        masking = masking_of(name)
        masking.samples(messages)
        methods.add(masking.found.method)
    assert methods == {"generation_markers", "rendered_prefix", "sentinel"}
