"""A real HTTP server that speaks OpenAI's API over a toy "model", with the troubles of real ones.

Run as a process of its own. What it answers follows from the prompt alone, so that tests know it
beforehand. Trouble comes as told: each prompt's first requests may be refused for a while, fail,
hang or be cut off before it is served.
"""

import argparse
import json
import threading
import time
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "toy"
# (name, what the target's generation config says, what leaves the distribution as it is).
_DEFAULTS = (("top_k", 20, -1), ("min_p", 0.1, 0.0), ("repetition_penalty", 1.05, 1.0))


def continuation(prompt: list[int], num_tokens: int, start: int = 0) -> list[int]:
    """Tokens that the toy model goes on with."""
    seed = zlib.crc32(json.dumps(prompt).encode())
    return [(seed >> (i % 20)) % 200 + 20 for i in range(start, start + num_tokens)]


def answer_of(prompt: list[int], max_tokens: int, end: int) -> tuple[list[int], str]:
    """The answer's ids and why it ends: after 1 to 9 tokens it stops by itself."""
    length = zlib.crc32(json.dumps(prompt).encode()) % 9 + 1
    if length < max_tokens:
        return [*continuation(prompt, length), end], "stop"
    return continuation(prompt, max_tokens), "length"


class State:
    """What the server has seen and how it misbehaves."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.troubles = [t for t in arguments.trouble.split(",") if t]
        self.lock = threading.Lock()
        self.tries: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.in_flight = 0

    def trouble_for(self, key: str) -> str | None:
        """The trouble of this request, if it is one of a prompt's first."""
        with self.lock:
            number = self.tries[key]
            self.tries[key] += 1
        if self.stats["served"] == self.arguments.down_after and self.stats["503"] < 4:
            return "503"
        seed = zlib.crc32(key.encode())
        if not self.troubles or number >= seed % 3:
            return None
        return self.troubles[(seed // 3 + number) % len(self.troubles)]


class Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            names = self.state.arguments.models.split(",")
            self._reply(200, {"data": [{"id": name} for name in names]})
        elif self.path == "/stats":
            self._reply(200, dict(self.state.stats))
        else:
            self._reply(404, {"error": "no such path"})

    def do_POST(self) -> None:
        state = self.state
        with state.lock:
            state.in_flight += 1
            state.stats["most_in_flight"] = max(state.stats["most_in_flight"], state.in_flight)
        try:
            self._serve()
        finally:
            with state.lock:
                state.in_flight -= 1

    def _serve(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.state.arguments.delay)
        key = json.dumps([body.get("prompt"), body.get("messages"), body.get("ignore_eos")])
        trouble = self.state.trouble_for(key)
        if trouble is not None:
            with self.state.lock:
                self.state.stats[trouble] += 1
            return self._misbehave(trouble)
        if body["model"] not in self.state.arguments.models.split(","):
            return self._reply(404, {"error": f"no model {body['model']}"})
        expected = self.state.arguments.key
        if expected and self.headers.get("Authorization") != f"Bearer {expected}":
            return self._reply(401, {"error": "wrong key"})
        with self.state.lock:
            self.state.stats["served"] += 1
        return self._complete(body)

    def _misbehave(self, trouble: str) -> None:
        if trouble == "drop":
            self.close_connection = True
            self.connection.close()
        elif trouble == "hang":
            time.sleep(self.state.arguments.hang)
            self.close_connection = True
        else:
            self._reply(int(trouble), {"error": "not now"}, retry_after=trouble == "429")

    def _complete(self, body: dict[str, Any]) -> None:
        is_chat = self.path.endswith("chat/completions")
        prompt = prompt_of_chat(body) if is_chat else body["prompt"]
        if len(prompt) > self.state.arguments.longest:
            return self._reply(400, {"error": "the prompt is too long"})
        end = self.state.arguments.end
        if self.state.arguments.generation_config and any(
            body.get(name, default) != neutral for name, default, neutral in _DEFAULTS
        ):
            ids, reason = [end], "stop"  # another answer than the target's own
        elif body.get("ignore_eos"):
            ids, reason = continuation(prompt, body["max_tokens"]), "length"
        else:
            ids, reason = answer_of(prompt, body["max_tokens"], end)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        text = "".join(chr(0x100 + i) for i in ids if i != end)
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text, "reasoning_content": None}
        else:
            choice["text"] = text
        reply: dict[str, Any] = {"choices": [choice]}
        if self.state.arguments.ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
            if is_chat:
                reply["prompt_token_ids"] = prompt
        return self._reply(200, reply)

    def _reply(self, status: int, body: dict[str, Any], retry_after: bool = False) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if retry_after:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def prompt_of_chat(body: dict[str, Any]) -> list[int]:
    """What the toy server's own template makes of messages."""
    text = json.dumps([body["messages"], body.get("chat_template_kwargs"), body.get("tools")])
    return [ord(c) % 200 for c in text]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=MODEL)
    parser.add_argument("--end", type=int, required=True)
    parser.add_argument("--trouble", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--hang", type=float, default=30.0)
    parser.add_argument("--key", default="")
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--down-after", type=int, default=-1)
    parser.add_argument("--generation-config", action="store_true")
    parser.add_argument("--ids", action=argparse.BooleanOptionalAction, default=True)
    Handler.state = State(parser.parse_args())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket.listen(128)  # above its 5, a connection may wait a second for the next try
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
