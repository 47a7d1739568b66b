r"""Final answers of worked problems: found in a text, and compared.

An answer is the content of the last ``\boxed{…}``, else of the last ``<answer>…</answer>``, else
the last number.
"""

import re
from fractions import Fraction

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_NOISE = re.compile(r"[\s,$%]|\\(?:left|right|!|,|;)")


def is_right(text: str, solution: str) -> bool:
    """Tell whether the final answer of a text is that of a solution."""
    answer, wanted = find_answer(text), find_answer(solution)
    return answer is not None and wanted is not None and _normalize(answer) == _normalize(wanted)


def find_answer(text: str) -> str | None:
    """Return the final answer in a text, or None if it has none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_TAGGED, _NUMBER):
        if found := pattern.findall(text):
            return str(found[-1])
    return None


def _last_boxed(text: str) -> str | None:
    _, marker, rest = text.rpartition(r"\boxed{")
    depth = 1
    for index, letter in enumerate(rest if marker else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:index]
    return None


def _normalize(answer: str) -> Fraction | str:
    bare = _NOISE.sub("", answer).rstrip(".")
    bare = re.sub(r"^\\[dt]?frac\{(-?\d+)\}\{(\d+)\}$", r"\1/\2", bare)
    try:
        return Fraction(bare)
    except (ValueError, ZeroDivisionError):
        return bare.lower()
