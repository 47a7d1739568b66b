"""A folder is made whole, once, and recognised."""

from pathlib import Path

import pytest

from opdkit.actors.models.folders import MANIFEST_NAME, check_folder, make_folder
from opdkit.protocols.errors import ConfigError


def write_greeting(draft: Path) -> None:
    (draft / "greeting.txt").write_text("hello")


def refuse(draft: Path) -> None:
    raise AssertionError(f"{draft} is written again")


def test_a_folder_is_made_once_and_then_checked(tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "model"
    assert make_folder(folder, write_greeting, recipe="greeting")
    assert not make_folder(folder, refuse, recipe="greeting")
    assert (folder / "greeting.txt").read_text() == "hello"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        write_greeting(draft)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_folder(tmp_path / "model", fail, recipe="greeting")
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_keeps_the_winners_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def overtaken(draft: Path) -> None:
        make_folder(folder, write_greeting, recipe="greeting")
        write_greeting(draft)

    assert not make_folder(folder, overtaken, recipe="greeting")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", write_greeting, recipe="greeting")
    with pytest.raises(ConfigError, match="was made as 'greeting', but 'farewell' is wanted"):
        make_folder(tmp_path / "model", refuse, recipe="farewell")


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", write_greeting, recipe="greeting")
    (tmp_path / "model" / "greeting.txt").write_text("hullo")
    with pytest.raises(ConfigError, match=r"greeting\.txt has SHA-256 [0-9a-f]{64}, but"):
        check_folder(tmp_path / "model", recipe="greeting")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", write_greeting, recipe="greeting")
    (tmp_path / "model" / "greeting.txt").unlink()
    with pytest.raises(ConfigError, match=r"greeting\.txt has SHA-256 none: no such file"):
        check_folder(tmp_path / "model", recipe="greeting")


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"recipe": 1}'])
def test_a_folder_of_another_origin_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="was not made by opdkit"):
        check_folder(tmp_path, recipe="greeting")
