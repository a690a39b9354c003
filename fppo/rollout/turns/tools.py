"""Tools: functions that answer the policy's turns. Worker processes import this module, so it imports no torch.

A tool is `respond(conversation) -> messages`, a function or a coroutine. The conversation is a list of messages, dicts
with "role" and "content": the prompt, the policy's turns and the tools' messages; the policy's messages have "end" too,
the text or the token that ended the turn. A tool returns messages after which the policy continues; [] to let it
continue with nothing in between; or None to end the response.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from fppo.environments.calls import CALL, PlayerCall, message_problem
from fppo.environments.protocol import Message
from fppo.workers.imports import imported
from fppo.workers.sample import Sample

Respond = Callable[[list[Message]], Any]
_LONGEST = 64  # characters of an expression
_PLACES = 4  # decimals of a result


def calculator(conversation: Sequence[Mapping[str, Any]]) -> list[Message] | None:
    """Complete an open `<<48/2=` by its value, as `24>>`: the calculator of Cobbe et al. (2021), arXiv:2110.14168.

    The calculator needs "=" as a stop token. A turn that ends with an "=" elsewhere, or whose expression has no value,
    continues with nothing in between; any other turn ends the response.
    """
    last = conversation[-1]
    if not str(last.get("end", "")).endswith("="):
        return None
    before, opened, inside = str(last["content"]).rpartition("<<")
    del before
    value = evaluate(inside.removesuffix("=")) if opened and ">>" not in inside else None
    return [] if value is None else [{"role": "tool", "content": f"{value}>>"}]


def evaluate(expression: str) -> str | None:
    """The value of an expression of numbers, + - * / and parentheses, to four decimals; None for other texts, or if it
    has none.

    Nothing is executed: the text is parsed, and exact fractions are added up over its tree. Its size is bounded.
    """
    text = expression.replace(",", "").strip()
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9.+\-*/() ]+", text):
        return None
    try:
        return _text(_value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(repr(number))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _text(value: Fraction) -> str:
    scaled = round(value * 10**_PLACES)
    whole, rest = divmod(abs(scaled), 10**_PLACES)
    decimals = f".{rest:0{_PLACES}d}".rstrip("0").rstrip(".")
    return f"{'-' if scaled < 0 else ''}{whole}{decimals}"


TOOLS: Mapping[str, Respond] = {"calculator": calculator}


def resolve(name: str) -> Respond:
    """The tool of that name: a built-in one, or "module:function". Raises ValueError for any other name."""
    if ":" in name:
        return imported(name, "tool")
    if name not in TOOLS:
        raise ValueError(f"there is no tool {name!r}; there are {sorted(TOOLS)} and module:function")
    return TOOLS[name]


def with_turn(call: PlayerCall) -> list[Message]:
    """The conversation of a call, and the policy's turn after it."""
    assert call.reply is not None
    return [*call.state, {"role": "assistant", "content": call.reply.text, "end": call.reply.end}]


@attrs.frozen
class SampleTool:
    """A tool as worker processes call it: a sample holds a `PlayerCall`, whose state is the conversation so far, and
    the result comes back as JSON in "answer"."""

    respond: Respond

    def __call__(self, sample: Sample) -> Any:
        result = self.respond([dict(message) for message in with_turn(sample.extras[CALL])])
        return _later(result) if inspect.isawaitable(result) else _packed(result)


async def _later(result: Any) -> Any:
    return _packed(await result)


def _packed(result: Any) -> dict[str, Any]:
    """{"score", "answer"}, where the answer is JSON: [messages or null, what is wrong with them or null]."""
    problem = None if result is None else message_problem(result)
    return {"score": 0.0, "answer": json.dumps([None, problem] if problem else [result, None])}
