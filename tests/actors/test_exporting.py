"""What an export refuses before it loads a model."""

import pathlib

import pytest

from opdkit.actors.exporting import export_run
from opdkit.protocols.errors import ConfigError


@pytest.fixture
def run_directory(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that passes for a run's, as far as it is looked at."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text("")
    return tmp_path / "run"


def test_a_folder_that_is_no_run_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"RUN is .* there is no job\.yaml in it"):
        export_run(tmp_path, tmp_path / "out")


def test_a_file_as_the_target_is_refused(
    run_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "out"
    target.write_text("kept")
    with pytest.raises(ConfigError, match=r"DIR is .*/out', but that is a file"):
        export_run(run_directory, target)
    assert target.read_text() == "kept"


def test_a_target_that_is_not_empty_is_refused(
    run_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match=r"DIR is .*/out', but it exists and is not empty"):
        export_run(run_directory, tmp_path / "out")
