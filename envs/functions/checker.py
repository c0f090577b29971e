"""Judges function calls by what was allowed: types by the functions' own schemas, values by lists of alternatives.

Calls and possible answers go in, None or a reason comes out. The rules are the leaderboard's, described in its
documentation; the code is our own. Nothing is run and nothing is waited for.

- As many calls as expected; in any order, each expected one met by a call of its own.
- A call has the function's name, every required argument, and no argument that the answer does not know.
- A value is of the schema's type (a whole number will do for a float, a list for a tuple) and equal to one alternative.
  Texts are compared without case, spaces and the signs , . / - _ * ^ and with one kind of quotes.
- An argument may be left out where "" is among its alternatives. Inside an object each key has alternatives of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_IGNORED = re.compile(r"[ ,./\-_*^]")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "float": (int, float),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "tuple": (list,),
    "dict": (dict,),
    "object": (dict,),
    "any": (str, int, float, bool, list, dict),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One call that a policy made."""

    name: str
    arguments: Mapping[str, Any]


def judge(calls: Sequence[Asked], possible: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]) -> str:
    """Why the calls are wrong; empty where they are right."""
    if len(calls) != len(possible):
        return f"{len(calls)} calls, expected {len(possible)}"
    schemas = {function["name"]: function["parameters"] for function in functions}
    fits = [[_call_fault(call, answer, schemas) for call in calls] for answer in possible]
    if _matched([[not fault for fault in row] for row in fits]):
        return ""
    worst = next((row for row in fits if all(row)), fits[0])
    return min((fault for fault in worst if fault), key=_nearness, default="two calls meet the same expectation")


def _nearness(fault: str) -> bool:
    """Of several reasons, one about a call of the right function says more."""
    return fault.startswith("called ")


def _matched(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can be given a column of its own (augmenting paths)."""
    owner: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in seen:
                seen.add(column)
                if column not in owner or place(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _call_fault(call: Asked, answer: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    ((name, allowed),) = answer.items()
    if call.name != name:
        return f"called {call.name[:60]}, expected {name}"
    schema = schemas[name]
    if missing := [key for key in schema.get("required", ()) if key not in call.arguments]:
        return f"{name}: {missing[0]} is required"
    for key, value in call.arguments.items():
        declared = schema["properties"].get(key)
        if declared is None or key not in allowed:
            return f"{name}: {key[:60]} was not expected"
        if not _value_fits(value, allowed[key], declared):
            return f"{name}: {key} is {str(value)[:60]!r}"
    left_out = [key for key, options in allowed.items() if key not in call.arguments and "" not in options]
    return f"{name}: {left_out[0]} was left out" if left_out else ""


def _value_fits(value: Any, options: Sequence[Any], declared: Mapping[str, Any]) -> bool:
    """Of the declared type and equal to an alternative; or the very alternative, of another type: some stand for the name
    of a variable.
    """
    if _is(value, _TYPES.get(declared.get("type", "any"), _TYPES["any"])):
        return any(_equal(value, option) for option in options)
    return any(type(value) is type(option) and value == option and option != "" for option in options)


def _is(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _equal(value: Any, option: Any) -> bool:
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    if isinstance(value, str) and isinstance(option, str):
        return plain(value) == plain(option)
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(_equal(a, b) for a, b in zip(value, option, strict=True))
    if isinstance(value, dict) and isinstance(option, dict):
        return _object_fits(value, option)
    return type(value) in (int, float) and type(option) in (int, float) and value == option


def _object_fits(value: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    """An object against one whose keys have lists of alternatives (or, now and then, a plain value)."""
    if value.keys() - option.keys():
        return False
    for key, wanted in option.items():
        alternatives = wanted if isinstance(wanted, list) else [wanted]
        if key not in value:
            if "" not in alternatives:
                return False
        elif not any(_equal(value[key], one) for one in alternatives) and not _equal(value[key], wanted):
            return False
    return True


def plain(text: str) -> str:
    """A text as it is compared."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


def example(answer: Mapping[str, Any], function: Mapping[str, Any]) -> Asked:
    """A call that meets a possible answer: the first alternative of each argument."""
    ((name, allowed),) = answer.items()
    required = function["parameters"].get("required", ())
    arguments = {}
    for key, options in allowed.items():
        given = [option for option in options if option != ""]
        if given and ("" not in options or key in required):
            arguments[key] = _first(given[0])
        elif key in required:
            arguments[key] = ""
    return Asked(name, arguments)


def _first(option: Any) -> Any:
    if isinstance(option, dict):
        out = {}
        for key, wanted in option.items():
            alternatives = wanted if isinstance(wanted, list) else [wanted]
            given = [one for one in alternatives if one != ""]
            if given and "" not in alternatives:
                out[key] = _first(given[0])
        return out
    return [_first(item) for item in option] if isinstance(option, list) else option
