#!/usr/bin/env python3
"""A command that solves calculator tasks: usage `solve.py TASK_FILE`. Standard library only.

It talks to OPENAI_BASE_URL with OPENAI_API_KEY, offers the task's tools, and writes the model's answer to answer.txt in the folder it was
started in. Exit status 1 where the model could not be asked.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_TURNS = 6


def main(arguments: list[str]) -> int:
    """Asks until the model calls no tool any more, or too often."""
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    messages: list[dict[str, Any]] = task["messages"]
    for _ in range(MAX_TURNS):
        try:
            reply = ask(messages, task["tools"])
        except urllib.error.HTTPError as error:
            print(f"HTTP {error.code}: {error.read()[:500].decode(errors='replace')}", file=sys.stderr)
            return 1
        except (OSError, ValueError, LookupError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": answer_call(call)} for call in calls]
        if not calls:
            break
    answer = str(messages[-1].get("content") or "").strip()
    Path("answer.txt").write_text(answer, encoding="utf-8")
    print(answer)
    return 0


def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The next assistant message."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return {key: value for key, value in message.items() if value is not None}


def answer_call(call: dict[str, Any]) -> str:
    """What the calculator says to a call."""
    try:
        expression = str(json.loads(call["function"]["arguments"])["expression"])
        if len(expression) > 200:
            raise ValueError("the expression is too long")
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
        return f"Error: {error}"


def value(node: ast.expr) -> int:
    """The value of an expression of integers with + - * and parentheses."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
            return int(OPERATORS[type(kind)](value(left), value(right)))
    raise ValueError("only integers, + - * and parentheses")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
