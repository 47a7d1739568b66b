"""Final answers are found and compared by value."""

import pytest

from opdkit.engine.scheduling.answers import find_answer, is_right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first 3, so \boxed{12}.", "12"),
        (r"\boxed{\frac{1}{2}} and then", r"\frac{1}{2}"),
        ("<answer>A</answer> or <answer> 7 </answer>", " 7 "),
        ("it is 1,234 apples", "1,234"),
        ("no idea", None),
        (r"\boxed{1", "1"),
    ],
)
def test_the_last_and_most_explicit_answer_counts(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "solution", "right"),
    [
        (r"\boxed{0.50}", r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{1/2}", "0.5", True),
        ("<answer>B</answer>", r"\boxed{b}", True),
        ("$1,000", "1000", True),
        ("41", "42", False),
        ("no idea", "42", False),
        ("42", "no idea", False),
        (r"\boxed{1/0}", "1", False),
    ],
)
def test_answers_compare_by_value(text: str, solution: str, right: bool) -> None:
    assert is_right(text, solution) is right
