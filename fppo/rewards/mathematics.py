"""Answers as mathematics, by the package math-verify: the answer of a response, and whether it counts as one.

An unevaluated expression does not count, even if it equals the truth: "2*3" says nothing about 6 that the problem has
not said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fppo._errors import shown
from fppo.rewards.truths import texts_of

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MATH = re.compile(r"\\boxed|(?<!\\)\$.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_CURRENCY = "$€£¥₹₽₩₫฿₱₪₴"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!,?|[ ])\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_FRACTION = r"(?:\d+\s*)?(?:\\[dtc]?frac\{?(?P<a>-?\d+)\}?\{?(?P<b>\d+)\}?|(?P<c>-?\d+)\s*/\s*(?P<d>\d+))"
_SCIENTIFIC = r"[1-9](?:\.\d+)?\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*(?:\^|\*\*)\s*\{?-?\d+\}?"
_LITERAL = re.compile(rf"[+-]?\s*(?:{_FRACTION}|{_SCIENTIFIC}|{_NUMBER}|\\infty|∞)")
# what stands around numbers: units, texts, spaces, marks of money, percent and degrees, dollars of LaTeX
_AROUND = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname|rm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?"
    r"|\\(?:left|right|displaystyle|quad|qquad|circ|degree|%|\$|!|;|:| )|\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?"
    rf"|[{re.escape(_CURRENCY)}%°~*.]+(?=\s|$)|[{re.escape(_CURRENCY)}%°~]|\\,(?!\d)"
)
_BETWEEN = re.compile(
    r"\\cup|\u222a|\\in\b|\\lbrace|\\rbrace|\\[{}]|\b(?:and|or|in|x|y|z|n|k)\b|[(){}\[\];]|,(?!\d{3}(?!\d))"
)
_EQUALS = re.compile(r"(?<![<>!\\])=|\\approx|≈")
_LONGEST = 1000  # characters of an answer that may be a number
_TOKEN = re.compile(rf"{_NUMBER}|[^\W\d_]+|\S")


class _Answered(NamedTuple):
    """The answer of a text: values of sympy, and the text of the first."""

    values: list[Any]
    text: str

    @property
    def found(self) -> list[Any]:
        """The values and the text, as math-verify compares them."""
        return [*self.values, *([self.text] if self.text else [])]


def judged(response: str, truth: Any, *, expressions: bool = False) -> tuple[float, str | None]:
    """Judge a response: 1 if its answer equals the truth, else 0; and the answer as text, None if it has none.

    The answer is in the response's boxes or, without boxes, is found by math-verify in its text. With `expressions` all
    that equals the truth is right. Raises ValueError for a truth that cannot be parsed.
    """
    import math_verify as library

    golds = [_read(_marked(text)) for text in texts_of(truth)]
    golds = [gold for gold in golds if gold.found]
    if not golds:
        raise ValueError(f"the ground truth {shown(truth)} is not mathematics that can be parsed")
    read = _answer(response)
    if read is None or not read.found:
        return 0.0, None
    answer = str(read.found[-1])
    for gold in golds:
        if (expressions or _is_answer(read, gold)) and library.verify(gold.found, read.found, timeout_seconds=None):
            return 1.0, answer
    return 0.0, answer


def own_answer(truth: Any) -> str:
    """A response that says the truth, and nothing else. Raises ValueError as `texts_of` does."""
    return _marked(texts_of(truth)[0])


def is_plain(truth: Any) -> bool:
    """Whether a truth is a plain number, which as a response surely scores 1."""
    return re.fullmatch(rf"-?{_NUMBER}", texts_of(truth)[0]) is not None


def _marked(text: str) -> str:
    r"""A truth as math-verify reads one: in a box, unless it has marks of mathematics; \$18 is money, and no mark."""
    return text if _MATH.search(text) else f"\\boxed{{{_plainer(text)}}}"


def _plainer(text: str) -> str:
    """The text of a box without what math-verify misreads: mixed numbers as 1 1/2, spaces between thousands, words."""
    if len(text) > _LONGEST:
        return text
    text = re.sub(r"(?<![\d./^])(\d+)\s+(\d+)/(\d+)(?![\d/.])", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)(?:\\,|\\!|\\;)(?=\d{3}(?!\d))", ",", text)
    unit = re.fullmatch(rf"(\\?[{re.escape(_CURRENCY)}]?-?{_NUMBER})\s+[A-Za-z]{{3,}}[A-Za-z ]*", text)
    return text if unit is None else unit[1]


def _read(text: str) -> _Answered:
    import math_verify as library

    found = library.parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    texts = [x for x in found if isinstance(x, str)]
    return _Answered([x for x in found if not isinstance(x, str)], texts[0] if texts else "")


def _answer(response: str) -> _Answered | None:
    """The answer of a response; None for an empty box, one that is not closed, and several numbers in a row."""
    boxes = [*_boxes(response)]
    if not boxes:
        return None if len(_last_numbers(response)) > 1 else _read(response)
    if any(not box for box in boxes):
        return None
    return _read(" and ".join(f"\\boxed{{{_plainer(box)}}}" for box in dict.fromkeys(boxes)))


def _last_numbers(response: str) -> set[str]:
    """The numbers in a row at the end of a response, with nothing but "or", "and", commas, semicolons and marks of
    money between them."""
    found: set[str] = set()
    for token in reversed(_TOKEN.findall(response.rstrip(" \t\n.!)")[-_LONGEST:].rpartition("\n")[2])):
        if re.fullmatch(_NUMBER, token):
            found.add(token)
        elif token not in {",", ";", "or", "and", *_CURRENCY}:
            break
    return found


def _boxes(text: str) -> Iterator[str]:
    """The contents of the boxes of a text; "" for one that is empty or not closed."""
    place = 0
    while (match := _BOX.search(text, place)) is not None:
        place = match.end()
        if text[place : place + 1] != "{":  # \boxed 6
            word = re.match(r"\S*", text[place:])
            yield (word[0] if word else "").rstrip("$.,")
            continue
        depth, end = 0, place
        for end in range(place, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                break
        inside = text[place + 1 : end] if not depth else ""
        place = end + 1
        yield inside.strip().removesuffix(".").strip()


def _is_answer(read: _Answered, gold: _Answered) -> bool:
    """Whether an answer counts for the truth. For a number, set or interval (`is_literal`) it must be one too; for
    other truths it must be an expression without arithmetic of numbers that the truth lacks."""
    if not is_literal(gold.text):
        return {*_arithmetic(read.values)} <= {*_arithmetic(gold.values)}
    if is_literal(read.text):
        return True
    return bool(read.values) and not _read(f"\\boxed{{{read.text}}}").values and _is_number(read.values[0])


def is_literal(text: str) -> bool:
    """Whether a text is a number, a fraction that is no whole number, a percentage or a power of ten, with a unit or
    without, or several of these, as sets and intervals have. Of an equation the right side counts."""
    if len(text) > _LONGEST:
        return False
    text = _EQUALS.split(text.replace("\N{MINUS SIGN}", "-"))[-1]
    text = _AROUND.sub(" ", re.sub(r"\\[dtc]?frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2 ", text))
    pieces = [piece.strip(" \t\n.") for piece in _BETWEEN.split(text)]
    pieces = [
        re.sub(r"(?<![\\\w])[^\W\d_]+(?:\s*/\s*[^\W\d_]+)?(?!\w)|(?<=\d)\s*[^\W\d_]+", "", x).strip() for x in pieces
    ]
    pieces = [piece for piece in pieces if piece]
    return bool(pieces) and all(_is_one(piece) for piece in pieces)


def _is_one(piece: str) -> bool:
    match = _LITERAL.fullmatch(piece)
    if match is None:
        return False
    above, below = match["a"] or match["c"], match["b"] or match["d"]
    return above is None or int(below) == 0 or int(above) % int(below) != 0


def _is_number(value: Any) -> bool:
    """Whether a value of sympy is a number, or a percentage."""
    parts = value.args if getattr(value, "is_Mul", False) else (value,)
    return sum(bool(getattr(part, "is_Number", False)) for part in parts) == 1 and len(parts) <= 2


def _arithmetic(values: list[Any]) -> Iterator[str]:
    """The unevaluated operations on numbers in values of sympy, by name."""
    import sympy

    for value in values:
        for each in value.flat() if hasattr(value, "flat") else [value]:
            for part in sympy.preorder_traversal(each):
                numbers = [x for x in getattr(part, "args", ()) if getattr(x, "is_Number", False)]
                factors = [x for x in numbers if abs(x) != 1]  # -x is a product
                open_power = isinstance(part, sympy.Pow) and len(numbers) == 2 and numbers[1].is_Integer
                if (
                    (isinstance(part, sympy.Add) and len(numbers) > 1)
                    or (isinstance(part, sympy.Mul) and len(factors) > 1)
                    or (open_power and numbers[1] != -1)
                ):
                    yield type(part).__name__
