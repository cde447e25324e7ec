"""Chat templates built like those of real families, each with the oracle of what it prints.

The oracle is written in Python, piece by piece: (text, whether the assistant wrote it). It knows
nothing of how paceline looks for spans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Messages = Sequence[dict[str, str]]
Pieces = list[tuple[str, bool]]

_LOOP = "{% for m in messages %}"
_END = "{% endfor %}"


@dataclass(frozen=True)
class Family:
    """A template, the special tokens of its tokenizer, the one that ends a turn, and the oracle:
    the pieces of a conversation that ends with an assistant turn."""

    name: str
    template: str
    specials: tuple[str, ...]
    end: str
    oracle: Callable[[Messages], Pieces]


def _chatml(messages: Messages, system: str | None = None, tail: str = "\n") -> Pieces:
    pieces: Pieces = []
    if system is not None and messages[0]["role"] != "system":
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in messages:
        written = message["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", written),
            (tail, False),
        ]
    return pieces


def _headers(messages: Messages) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for message in messages:
        pieces += [
            (f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False),
            (f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"),
        ]
    return pieces


def _inst(messages: Messages) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for message in messages:
        if message["role"] == "assistant":
            pieces.append((f" {message['content']}</s>", True))
        else:
            pieces.append((f"[INST] {message['content']}[/INST]", False))
    return pieces


def _turns(messages: Messages) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for message in messages:
        role = "model" if message["role"] == "assistant" else message["role"]
        pieces += [
            (f"<start_of_turn>{role}\n", False),
            (f"{message['content'].strip()}<end_of_turn>", role == "model"),
            ("\n", False),
        ]
    return pieces


def _role_tokens(messages: Messages) -> Pieces:
    """No end marker: a turn ends where the next role's token comes, if that is the user's."""
    pieces: Pieces = [("[gMASK]<sop>", False)]
    for i, message in enumerate(messages):
        after_answer = i > 0 and messages[i - 1]["role"] == "assistant"
        pieces += [
            (f"<|{message['role']}|>", after_answer and message["role"] == "user"),
            ("\n", False),
            (message["content"], message["role"] == "assistant"),
        ]
    return pieces


def _closing(messages: Messages) -> Pieces:
    """The whole conversation is closed by another token than the turns are."""
    pieces: Pieces = []
    for message in messages:
        pieces += [
            (f"<|{message['role']}|>\n", False),
            (f"{message['content']}<|end|>", message["role"] == "assistant"),
            ("\n", False),
        ]
    return [*pieces, ("<|endoftext|>", False)]


_CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CHATML_BODY = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FAMILIES = (
    Family(
        "chatml without prompt",
        _LOOP + _CHATML_BODY + _END,
        _CHATML_SPECIALS,
        "<|im_end|>",
        _chatml,
    ),
    Family(
        "chatml, eos is another token",
        _LOOP + _CHATML_BODY + _END + _CHATML_PROMPT,
        _CHATML_SPECIALS,
        "<|endoftext|>",
        _chatml,
    ),
    Family(
        "chatml with markers",
        _LOOP
        + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
        + _END
        + _CHATML_PROMPT,
        _CHATML_SPECIALS,
        "<|im_end|>",
        _chatml,
    ),
    Family(
        "chatml with markers that take in the header and the last newline",
        _LOOP
        + "{% if m.role == 'assistant' %}{% generation %}"
        + "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        + "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        + _END
        + _CHATML_PROMPT,
        _CHATML_SPECIALS,
        "<|im_end|>",
        _chatml,
    ),
    Family(
        "chatml with a system turn of its own",
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{{ '' }}"
        + "{% endif %}"
        + _LOOP
        + _CHATML_BODY
        + _END
        + _CHATML_PROMPT,
        _CHATML_SPECIALS,
        "<|im_end|>",
        lambda messages: _chatml(messages, system="Be good."),
    ),
    Family(
        "headers and trimmed words",
        "<bos>"
        + _LOOP
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + _END
        + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        + "{{ '' }}{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        _headers,
    ),
    Family(
        "instructions in brackets, no prompt, a space before answers",
        "<bos>"
        + _LOOP
        + "{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        + "{% else %}[INST] {{ m.content }}[/INST]{% endif %}"
        + _END,
        ("[INST]", "[/INST]", "</s>"),
        "</s>",
        _inst,
    ),
    Family(
        "turns of user and model",
        "<bos>"
        + _LOOP
        + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        + "{{ m.content | trim }}<end_of_turn>\n"
        + _END
        + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>", "<eos>"),
        "<eos>",
        _turns,
    ),
    Family(
        "role tokens end turns",
        "[gMASK]<sop>"
        + _LOOP
        + "<|{{ m.role }}|>\n{{ m.content }}"
        + _END
        + "{% if add_generation_prompt %}<|assistant|>\n{{ '' }}{% endif %}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
        "<|user|>",
        _role_tokens,
    ),
    Family(
        "closed by another token",
        _LOOP
        + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        + _END
        + "{% if add_generation_prompt %}<|assistant|>\n{{ '' }}{% else %}<|endoftext|>{% endif %}",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|endoftext|>"),
        "<|endoftext|>",
        _closing,
    ),
)
