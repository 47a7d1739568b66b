"""Rows, their order, and rows that are no prompts."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from opdkit.actors.files.prompt_files import JsonlPrompts, permutation
from opdkit.protocols.errors import ConfigError, PromptError
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.roles import PromptSource
from tests.conftest import Run

FIRST_ORDER = [7, 3, 2, 4, 6, 0, 5, 1, 8, 9]


def _row(text: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **columns}


def _write(directory: pathlib.Path, lines: Sequence[str | bytes | dict[str, Any]]) -> pathlib.Path:
    path = directory / "train.jsonl"
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in encoded))
    return path


def _answers(prompts: JsonlPrompts, ordinals: Sequence[int]) -> list[object]:
    return [prompts.row(Ordinal(ordinal))[1]["n"] for ordinal in ordinals]


def test_a_source_gives_all_columns_and_names_file_and_line(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path, [_row("é", answer=4), "", _row("b", answer=5)])
    prompts: PromptSource = JsonlPrompts(path, shuffle=False)
    assert len(prompts) == 2
    assert prompts.row(Ordinal(0)) == (f"{path}:1", _row("é", answer=4))
    assert prompts.row(Ordinal(1)) == (f"{path}:3", _row("b", answer=5))


def test_every_epoch_holds_every_row_once_in_another_order(tmp_path: pathlib.Path) -> None:
    prompts = JsonlPrompts(_write(tmp_path, [_row("x", n=n) for n in range(50)]), seed=3)
    epochs = [_answers(prompts, range(start, start + 50)) for start in (0, 50, 100)]
    assert all(sorted(map(str, epoch)) == sorted(map(str, range(50))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permutation(10, seed=0, epoch=0).tolist() == FIRST_ORDER
    assert permutation(10, seed=1, epoch=0).tolist() != FIRST_ORDER
    assert permutation(10, seed=0, epoch=1).tolist() != FIRST_ORDER


def test_seeds_and_epochs_do_not_stand_for_each_other() -> None:
    orders = {
        tuple(permutation(20, seed=seed, epoch=epoch).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_first_place_is_spread_evenly_over_the_rows() -> None:
    firsts = [int(permutation(8, seed=seed, epoch=0)[0]) for seed in range(4000)]
    for row in range(8):
        # Binomial(4000, 1/8): mean 500, standard deviation 21.
        assert 400 < firsts.count(row) < 600


def test_an_earlier_ordinal_can_be_drawn_again(tmp_path: pathlib.Path) -> None:
    prompts = JsonlPrompts(_write(tmp_path, [_row("x", n=n) for n in range(7)]))
    before = _answers(prompts, range(7))
    _answers(prompts, [700, 70, 7])
    assert _answers(prompts, range(7)) == before


def test_a_row_stands_for_its_samples_in_sequence(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path, [_row("x", n=n) for n in range(3)])
    prompts = JsonlPrompts(path, shuffle=False, samples_per_prompt=2, num_epochs=2)
    assert _answers(prompts, range(12)) == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert prompts.num_ordinals == 12


def test_the_last_epoch_ends(tmp_path: pathlib.Path) -> None:
    prompts = JsonlPrompts(_write(tmp_path, [_row("x")]), num_epochs=2)
    assert prompts.row(Ordinal(1))[1] == _row("x")
    with pytest.raises(IndexError, match=r"ordinal is 2, but must be in \[0, 2\)"):
        prompts.row(Ordinal(2))


def test_without_epochs_there_is_no_end(tmp_path: pathlib.Path) -> None:
    prompts = JsonlPrompts(_write(tmp_path, [_row("x")]))
    assert prompts.num_ordinals is None
    assert prompts.row(Ordinal(10**12))[1] == _row("x")


def test_tools_may_be_a_list_or_null(tmp_path: pathlib.Path) -> None:
    rows = [_row("x", tools=[{"type": "function"}]), _row("x", tools=None)]
    prompts = JsonlPrompts(_write(tmp_path, rows), shuffle=False)
    assert [prompts.row(Ordinal(i))[1] for i in range(2)] == rows


def test_a_reply_at_the_end_is_kept(tmp_path: pathlib.Path) -> None:
    row = _row("q")
    row["messages"].append({"role": "assistant", "content": "old"})
    assert JsonlPrompts(_write(tmp_path, [row])).row(Ordinal(0))[1] == row


BAD_ROWS: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "is not JSON"),
    "no UTF-8": (b'{"messages": "\xff"}', "is not JSON"),
    "a list": ("[1]", "is a JSON list, but must be an object"),
    "other columns": ('{"prompt": "x"}', "has no 'messages', only 'prompt'"),
    "nothing": ("{}", "has no 'messages', only nothing"),
    "text": ('{"messages": "hi"}', "messages must be a list that is not empty"),
    "no message": ('{"messages": []}', "messages must be a list that is not empty"),
    "no role": ('{"messages": [{"content": "x"}]}', "messages[0] must be an object with a role"),
    "no content": ('{"messages": [{"role": "user"}]}', "messages[0] of 'user' must have content"),
    "nested": ("[" * 5000 + "]" * 5000, "is nested too deeply"),
    "a reply alone": (
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        "messages holds only a reply",
    ),
    "a number for tools": (
        '{"messages": [{"role": "user", "content": "x"}], "tools": 5}',
        "tools must be a list or null, got 5",
    ),
}


@pytest.mark.parametrize(("line", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: pathlib.Path, line: str | bytes, message: str
) -> None:
    path = _write(tmp_path, [_row("good"), line, _row("good")])
    prompts = JsonlPrompts(path, shuffle=False)
    with pytest.raises(PromptError) as caught:
        prompts.row(Ordinal(1))
    assert str(caught.value).startswith(f"{path}:2")
    assert message in str(caught.value)
    assert prompts.row(Ordinal(2))[1] == _row("good")


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_rows_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train\.jsonl (is empty|holds no rows)"):
        JsonlPrompts(path)


def test_a_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        JsonlPrompts(tmp_path / "none.jsonl")


def test_a_path_that_none_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\\x00b' holds a NUL character"):
        JsonlPrompts("a\0b")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_row(
    tmp_path: pathlib.Path,
) -> None:
    line = json.dumps(_row("x")).encode()
    path = _write(tmp_path, [b"\xef\xbb\xbf" + line + b"\r", line + b"\r", b""])
    prompts = JsonlPrompts(path, shuffle=False)
    assert [prompts.row(Ordinal(i))[1] for i in range(2)] == [_row("x")] * 2


def test_the_fingerprint_tells_whether_the_file_changed(tmp_path: pathlib.Path) -> None:
    first = JsonlPrompts(_write(tmp_path, [_row("x")])).fingerprint
    assert JsonlPrompts(_write(tmp_path, [_row("x")])).fingerprint == first
    assert JsonlPrompts(_write(tmp_path, [_row("y")])).fingerprint != first


def test_a_row_is_drawn_without_blocking_the_event_loop(run: Run, tmp_path: pathlib.Path) -> None:
    prompts = JsonlPrompts(_write(tmp_path, [_row("x", n=1)]))

    async def draw() -> object:
        return prompts.row(Ordinal(0))[1]["n"]

    assert run(draw()) == 1
