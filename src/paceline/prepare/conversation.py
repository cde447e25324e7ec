"""Conversations in one canonical form, whatever the data set calls its fields and roles.

Canonical: `messages` with roles system, developer, user, assistant, tool; `content` a string;
`reasoning_content` a string; `tool_calls` in the API's form with `arguments` as they were given.
"""

import json
from dataclasses import dataclass
from typing import Any

from paceline.prepare.reading import from_json
from paceline.prepare.rows import Identity, RowError, decoded, digest

ASSISTANT = "assistant"

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# A call whose arguments have another name would else be one without any.
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_TEXT_PARTS = ("text", "input_text", "output_text")

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One conversation. `tools`: schemas in the API's form, None where the row has none.

    content_hash: of all that is rendered. prompt_hash: of what comes before the first answer,
    system messages left out; the held-out split of rows without a conversation_id goes by it, so
    that the same question with another answer, another system message or another id never stands
    on both sides, and a data set keeps its split when its answers are regenerated. finished: False
    where the last answer was cut, so that the target did not write its end; None: unknown.
    """

    identity: Identity
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    content_hash: str
    prompt_hash: str
    finished: bool | None = None

    @property
    def assistant_turns(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT]


def conversation(row: dict[str, Any], identity: Identity) -> Conversation | None:
    """The row's conversation, None where it has none. Raises RowError."""
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            raw = decoded(row[key])
            break
    else:
        return None
    if not isinstance(raw, list):
        raise RowError("bad_message", f"{key} is {type(raw).__name__}, not a list")
    if not raw:
        raise RowError("empty", f"{key} is empty")
    messages = [canonical_message(value, f"{key}[{i}]") for i, value in enumerate(raw)]
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(row.get("tools"))
    return Conversation(
        identity=identity,
        messages=messages,
        tools=tools,
        content_hash=_hash([messages, tools]),
        prompt_hash=_hash(_first_prompt(messages)),
    )


def canonical_message(value: Any, where: str) -> Message:
    """One message in canonical form. Raises RowError that names `where` it stands."""
    if not isinstance(value, dict):
        raise RowError("bad_message", f"{where} is {type(value).__name__}, not an object")
    given = value.get("role", value.get("from"))
    role = _ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise RowError("unknown_role", f"{where} has role {given!r}; known are {', '.join(_ROLES)}")
    known = (
        *("role", "from", "content", "value", "tool_calls", "function_call"),
        *_REASONING_KEYS,
    )
    message = {k: v for k, v in value.items() if k not in known and v is not None}
    message["role"] = role
    content = value.get("content", value.get("value"))
    if isinstance(given, str) and given.lower() == "function_call":
        message.update(content="", tool_calls=_called_in_text(content, where))
        return message
    if role == ASSISTANT:
        _add_assistant_fields(message, value, where)
    elided = content is None and ("tool_calls" in message or "reasoning_content" in message)
    message["content"] = "" if elided else _text(content, where)
    return message


def _add_assistant_fields(message: Message, value: Message, where: str) -> None:
    for key in _REASONING_KEYS:
        if value.get(key):
            message["reasoning_content"] = _text(value[key], f"{where}.{key}")
            break
    calls = decoded(value.get("tool_calls"))
    if not calls and (call := decoded(value.get("function_call"))):
        calls = [call]  # the API's older form
    if calls:
        if not isinstance(calls, list):
            raise RowError("bad_tool_call", f"{where}.tool_calls is not a list")
        message["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]


def _text(content: Any, where: str) -> str:
    """A string, or a list of text parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("bad_message", f"{where}: content is {content!r}, not text")
    pieces = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            pieces.append(part)
        elif isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS:
            pieces.append(_text(part.get("text"), f"{where}.content[{i}]"))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError("unsupported_part", f"{where}.content[{i}] is {kind!r}, not text")
    return "".join(pieces)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RowError("bad_tool_call", f"{where} is {type(call).__name__}, not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("bad_tool_call", f"{where} has no function name")
    arguments = next((function[key] for key in _ARGUMENT_KEYS if key in function), None)
    parse_arguments(arguments, where)
    canonical = {"type": "function", "function": {"name": function["name"]}}
    canonical["function"]["arguments"] = {} if arguments in (None, "") else arguments
    return canonical | ({"id": call["id"]} if call.get("id") else {})


def parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as a mapping, given so or as JSON text. Raises RowError that says where."""
    if arguments in (None, ""):
        return {}
    try:
        value = from_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise RowError("bad_tool_call", f"{where}: arguments are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RowError("bad_tool_call", f"{where}: arguments are {value!r}, not an object")
    return value


def _called_in_text(content: Any, where: str) -> list[dict[str, Any]]:
    """ShareGPT's `function_call` turns hold the call as JSON text."""
    try:
        calls = from_json(_text(content, where))
    except ValueError as error:
        raise RowError("bad_tool_call", f"{where} is not a JSON call: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = decoded(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("bad_field", "tools is not a list of schemas")
    return [
        tool if "function" in tool or "type" in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


def _first_prompt(messages: list[Message]) -> list[Any]:
    prompt: list[Any] = []
    for message in messages:
        if message["role"] == ASSISTANT and prompt:
            return prompt
        if message["role"] not in ("system", "developer", ASSISTANT):
            prompt.append([message["role"], message["content"]])
    return prompt or messages


def _hash(value: Any) -> str:
    try:
        return digest(json.dumps(value, sort_keys=True, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        # JSON can say half a surrogate pair; no tokenizer can read it.
        raise RowError("invalid_text", f"the messages hold what is no text: {error}") from error
    except RecursionError as error:
        raise RowError("bad_field", "messages or tools are nested too deeply") from error
    except TypeError as error:
        raise RowError("bad_field", f"the messages hold what JSON cannot say: {error}") from error
