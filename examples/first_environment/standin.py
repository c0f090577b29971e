"""Stands in for a model behind an OpenAI-compatible URL, for docs/first-environment.md: it counts letters with a tool; long words it gets
wrong.

    python standin.py 8799

Standard library only. Any server that speaks chat completions could stand here: vLLM, SGLang, `palestra serve`, a vendor's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONG = 7
"""Letters from which a word is answered wrongly."""


def reply(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a model would say next."""
    word, letter = question(messages)
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": str(int(last["content"]) + (len(word) > LONG))}
    call = {"name": "count", "arguments": json.dumps({"word": word, "letter": letter})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
    }


def question(messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The word and the letter that are asked for."""
    asked = next(str(message["content"]) for message in messages if message["role"] == "user")
    quoted = re.findall('"([a-z]{1,40})"', asked)
    return quoted[-1], quoted[0]


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = reply(asked["messages"])
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        usage = {"prompt_tokens": 50, "completion_tokens": 10, "total_tokens": 60}
        body = json.dumps(
            {"id": "standin", "object": "chat.completion", "model": asked["model"], "choices": [choice], "usage": usage}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps quiet."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
