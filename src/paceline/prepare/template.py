"""The target's chat template: its text, the form of messages that it takes, and its rendering.

transformers' own Jinja environment renders, so that the text is what the target's users get.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import TargetError, UsageError
from paceline.prepare.conversation import Message, parse_arguments
from paceline.prepare.rows import RowError
from paceline.target.spec import Target

# A word that no template and no data holds; letters only, so that nothing escapes or trims it.
SENTINEL = "qzSentinelWordzq"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What Jinja and the templates' own expressions raise; a template is foreign code.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Tools = list[dict[str, Any]] | None

# Some templates print calls only where tools are told.
_SOME_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class MessageForm:
    """How a template wants what data sets write in several ways; learnt by trying."""

    content: Literal["string", "parts"] = "string"
    arguments: Literal["dict", "string", "unsupported"] = "dict"
    reasoning_key: str | None = None
    developer_role: str = "developer"


class ChatTemplate:
    """A chat template with its variables, ready to render canonical messages.

    Raises TargetError for a template that Jinja cannot read.
    """

    def __init__(
        self,
        text: str,
        tokenizer: PreTrainedTokenizerBase,
        variables: dict[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        variables = dict(variables or {})
        self.text = text
        self.default_tools: Tools = variables.pop("tools", None)
        self.system_prompt = system_prompt
        self.has_markers = bool(_MARKERS.search(text))
        self._variables = {**tokenizer.special_tokens_map, **variables}
        # Some targets' own tokenizers (Kimi's) render otherwise than transformers does.
        own = type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        self._own_render = tokenizer.apply_chat_template if own else None
        self.form = MessageForm()
        self.form = self._learn_form()

    def render(
        self, messages: Sequence[Message], tools: Tools = None, generation_prompt: bool = False
    ) -> str:
        """The text of canonical messages. Raises RowError with the template's own message."""
        return self._render(messages, tools, generation_prompt, markers=False)[0]

    def render_with_markers(
        self, messages: Sequence[Message], tools: Tools = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character spans of the template's own generation markers."""
        return self._render(messages, tools, False, markers=True)

    def _render(
        self, messages: Sequence[Message], tools: Tools, generation_prompt: bool, markers: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        shaped = [self._shape(message) for message in self._with_system(messages)]
        settings = {
            "tools": tools or self.default_tools,
            "chat_template": self.text,
            "add_generation_prompt": generation_prompt,
            **self._variables,
        }
        try:
            if self._own_render is not None and not markers:
                return self._own_render(shaped, tokenize=False, **settings), []
            texts, spans = render_jinja_template(
                [shaped], return_assistant_tokens_mask=markers, **settings
            )
        except TemplateSyntaxError as error:
            raise TargetError(
                f"the chat template is not Jinja, line {error.lineno}: {error.message}"
            ) from error
        except _TEMPLATE_ERRORS as error:
            raise RowError("template_error", f"the chat template says: {error}") from error
        return texts[0], spans[0] if spans else []

    def as_sent(self, messages: Sequence[Message]) -> list[Message]:
        """Canonical messages as the chat API of a server takes them: arguments are text there, and
        thinking has two names (vLLM 0.16 passes over the one that SGLang reads)."""
        sent = []
        for message in self._with_system(messages):
            copy = dict(message)
            if "reasoning_content" in message:
                copy["reasoning"] = message["reasoning_content"]
            if "tool_calls" in message:
                copy["tool_calls"] = [_call_as_text(call) for call in message["tool_calls"]]
            sent.append(copy)
        return sent

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system_prompt and (not messages or messages[0]["role"] != "system"):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return list(messages)

    def _shape(self, message: Message) -> Message:
        """A canonical message as this template wants it."""
        form = self.form
        shaped = dict(message)
        if message["role"] == "developer":
            shaped["role"] = form.developer_role
        if form.content == "parts":
            shaped["content"] = [{"type": "text", "text": message["content"]}]
        reasoning = shaped.pop("reasoning_content", None)
        if reasoning and form.reasoning_key:
            shaped[form.reasoning_key] = reasoning
        if "tool_calls" in message:
            shaped["tool_calls"] = [self._shape_call(call) for call in message["tool_calls"]]
        return shaped

    def _shape_call(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.form.arguments == "string":
            return _call_as_text(call)
        arguments = parse_arguments(call["function"]["arguments"], "tool_calls")
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _learn_form(self) -> MessageForm:
        """Try what the template prints; the first form that it prints whole is taken."""
        form = MessageForm()
        for content in ("string", "parts"):
            if SENTINEL in self._try(replace(form, content=content), [_user(SENTINEL)]):
                form = replace(form, content=content)
                break
        developer = [{"role": "developer", "content": SENTINEL}, _user("u")]
        if SENTINEL not in self._try(form, developer) and SENTINEL in self._try(
            replace(form, developer_role="system"), developer
        ):
            form = replace(form, developer_role="system")
        form = replace(form, arguments=self._learn_arguments(form))
        return replace(form, reasoning_key=self._learn_reasoning(form))

    def _learn_reasoning(self, form: MessageForm) -> str | None:
        thought = {"role": "assistant", "content": "a", "reasoning_content": SENTINEL}
        # Some templates (Gemma 4) print thinking only in turns that call tools.
        calling = {**thought, "tool_calls": [_call({"a": "v"})]}
        for turn, tools in ((thought, None), (calling, _SOME_TOOLS)):
            for key in ("reasoning_content", "thinking", "reasoning"):
                tried = replace(form, reasoning_key=key)
                if SENTINEL in self._try(tried, [_user("u"), turn], tools):
                    return key
        return None

    def _learn_arguments(self, form: MessageForm) -> Literal["dict", "string", "unsupported"]:
        arguments = {SENTINEL: "v w"}
        calling = {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}
        dialogue = [_user("u"), calling]
        for tools in (None, _SOME_TOOLS):
            text = self._try(replace(form, arguments="dict"), dialogue, tools)
            # Python's own spelling of a dict is no JSON: the template wanted a string.
            if SENTINEL in text and repr(arguments) not in text:
                return "dict"
            text = self._try(replace(form, arguments="string"), dialogue, tools)
            if json.dumps(arguments) in text:
                return "string"
        return "unsupported"

    def _try(self, form: MessageForm, messages: list[Message], tools: Tools = None) -> str:
        previous, self.form = self.form, form
        try:
            return self.render(messages, tools)
        except RowError:
            return ""
        finally:
            self.form = previous


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text, as they were written where they were text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": text}}


def template_text(target: Target, path: str | None = None) -> str | None:
    """The chat template in a file, else the target's own; None where the target has none.

    Raises UsageError for a file that is not there.
    """
    if path is not None:
        if not Path(path).is_file():
            raise UsageError(f"chat_template: {path}: no such file")
        return Path(path).read_text()
    template = target.tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            raise TargetError(
                f"{target.folder}: the tokenizer has chat templates {sorted(template)} and none "
                "called default: give one in a file as `chat_template`"
            )
        return template["default"]
    return template


def require_template(target: Target, path: str | None = None) -> str:
    """Like template_text, and there must be one. Raises TargetError."""
    text = template_text(target, path)
    if text is None:
        raise missing_template(target)
    return text


def missing_template(target: Target) -> TargetError:
    return TargetError(
        f"{target.folder}: the tokenizer has no chat template, so conversations cannot be put "
        "into the target's own form: give a Jinja template in a file as `chat_template`"
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _call(arguments: dict[str, str]) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"type": "function", "id": "call00000", "function": function}
