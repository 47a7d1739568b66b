"""Temporary folders vanish with the run, or with the next one."""

import pathlib

from opdkit.actors.scratch import RECORD, remove_leftovers, scratch_folders


def test_folders_vanish_at_the_end(tmp_path: pathlib.Path) -> None:
    with scratch_folders(tmp_path) as scratch:
        folders = [pathlib.Path(scratch.session), pathlib.Path(scratch.weights)]
        assert all(folder.is_dir() for folder in folders)
        (folders[1] / "policy-00000001.safetensors").write_bytes(b"weights")
    assert not any(folder.exists() for folder in folders)
    assert not (tmp_path / RECORD).exists()


def test_a_killed_run_is_cleaned_up_by_the_next(tmp_path: pathlib.Path) -> None:
    killed = scratch_folders(tmp_path)
    old = killed.__enter__()
    with scratch_folders(tmp_path) as new:
        assert new != old
        assert not pathlib.Path(old.session).exists()
        assert not pathlib.Path(old.weights).exists()
    remove_leftovers(tmp_path)  # nothing is left to do


def test_a_unix_socket_fits_below_the_session_folder(tmp_path: pathlib.Path) -> None:
    below = "/session_2026-12-31_23-59-59_999999_9999999/sockets/plasma_store"
    with scratch_folders(tmp_path) as scratch:
        assert len(scratch.session + below) < 107
