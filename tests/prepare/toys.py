"""Small targets and templates for the data stage's tests: real tokenizers, real (tiny) models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.dataset import TokenDataset

CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>", "<bos>", "<think>", "</think>")

_HEAD = "<|im_start|>{{ m['role'] }}\n"
CHATML = "{% for m in messages %}" + _HEAD + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
CHATML_PROMPT = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML_GEN = (
    "{% for m in messages %}" + _HEAD + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An answer's thinking is dropped as soon as a user turn follows.
THINK_STRIP = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    + _HEAD
    + "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    + _HEAD
    + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
TOOLS_ITEMS = (
    "{% for m in messages %}" + _HEAD + "{{ m['content'] or '' }}"
    "{% for c in m.get('tool_calls', []) %}[call {{ c['function']['name'] }}"
    "{% for k, v in c['function']['arguments']|items %} {{ k }}={{ v }}{% endfor %}]"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
TOOLS_TEXT = TOOLS_ITEMS.replace(
    "{% for k, v in c['function']['arguments']|items %} {{ k }}={{ v }}{% endfor %}",
    "{{ ' ' + c['function']['arguments'] }}",
)
TOOLS_JSON = TOOLS_ITEMS.replace(
    "{% for k, v in c['function']['arguments']|items %} {{ k }}={{ v }}{% endfor %}",
    " {{ c['function']['arguments'] | tojson }}",
)
BOS_CHATML = "<bos>" + CHATML


def toy_tokenizer(
    template: str | None,
    specials: Sequence[str] = CHATML_SPECIALS,
    eos: str = "<|im_end|>",
    adds_bos: bool = False,
) -> PreTrainedTokenizerFast:
    """One token per special marker, else one per UTF-8 byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys([*specials, "<bos>", eos])))
    if adds_bos:
        bos = ("<bos>", tokenizer.token_to_id("<bos>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[bos]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos, pad_token=eos
    )
    fast.chat_template = template
    return fast


def toy_target(folder: Path, tokenizer: PreTrainedTokenizerFast, num_padding: int = 4) -> Path:
    """A folder with the tokenizer and a tiny random Llama of float32 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + num_padding,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    # Wider logits than a fresh model has: greedy choices must not hang on rounding.
    model.lm_head.weight.data.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chatml_target(folder: Path, template: str | None, **settings: Any) -> Path:
    return toy_target(folder, toy_tokenizer(template, **settings))


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines = [
        line if "\ud800" not in line else json.dumps(row)
        for line, row in zip(lines, rows, strict=True)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """A row of alternating user and assistant turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, **fields}


class Prepared:
    """A run of `prepare` over rows, and what it wrote."""

    def __init__(self, tmp_path: Path, target: Path, rows: Sequence[Any], **options: Any) -> None:
        data = write_rows(tmp_path / "rows.jsonl", rows)
        self.folder = tmp_path / "prepared"
        values = {"heldout_share": 0.0, "max_skipped_share": 1.0} | options
        self.result = paceline.prepare(
            target=str(target), data=[data], out=str(self.folder), **values
        )
        self.samples = list(TokenDataset(self.folder))
        skipped = (self.folder / "skipped.jsonl").read_text().split("\n")
        self.skipped = [json.loads(line) for line in skipped if line]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(target)

    def decoded_spans(self, sample_number: int = 0) -> list[str]:
        """The text of each run of supervised tokens."""
        sample = self.samples[sample_number]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
        return [
            self.tokenizer.decode(sample.input_ids[a:b].tolist())
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]

    def text(self, sample_number: int = 0) -> str:
        return self.tokenizer.decode(self.samples[sample_number].input_ids.tolist())
