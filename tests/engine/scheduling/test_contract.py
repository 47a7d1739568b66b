"""A dataset row becomes a request, or says why it cannot."""

import pytest

from opdkit.engine.scheduling.contract import RolloutRequest
from opdkit.protocols.errors import PromptError

PROMPT = {"messages": [{"role": "user", "content": "question"}]}


def test_tools_of_a_row_are_copied() -> None:
    tools = [{"type": "function"}]
    request = RolloutRequest.from_row(PROMPT | {"tools": tools})
    assert request.tools == tools
    assert request.tools is not tools


@pytest.mark.parametrize("row", [PROMPT, PROMPT | {"tools": None}])
def test_a_row_may_have_no_tools(row: dict[str, object]) -> None:
    assert RolloutRequest.from_row(row).tools == []


@pytest.mark.parametrize("tools", [5, 0, "search", {"name": "search"}])
def test_tools_that_are_no_list_are_refused_by_column_and_value(tools: object) -> None:
    with pytest.raises(PromptError) as refusal:
        RolloutRequest.from_row(PROMPT | {"tools": tools})
    assert str(refusal.value) == f"tools must be a list or null, got {tools!r}"
