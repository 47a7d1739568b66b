"""Temporary folders vanish with the run, or with the next one."""

import os
import pathlib
import signal
import subprocess
import sys

import msgspec
import psutil  # type: ignore[import-untyped]  # publishes no types

from opdkit.actors.scratch import RECORD, Scratch, remove_leftovers, scratch_folders

WAIT_S = 30.0

RUN = """
import pathlib, sys
from opdkit.actors.scratch import scratch_folders
with scratch_folders(pathlib.Path(sys.argv[1])) as scratch:
    print(scratch.session, scratch.weights, sep="\\n", flush=True)
    sys.stdin.read()
"""


def start_writer(path: pathlib.Path) -> "subprocess.Popen[bytes]":
    """Start a process that would hold a file open for ever."""
    with path.open("wb") as log:
        return subprocess.Popen(["sleep", "infinity"], stdout=log)


def test_folders_vanish_at_the_end(tmp_path: pathlib.Path) -> None:
    with scratch_folders(tmp_path) as scratch:
        folders = [pathlib.Path(scratch.session), pathlib.Path(scratch.weights)]
        assert all(folder.is_dir() for folder in folders)
        (folders[1] / "policy-00000001.safetensors").write_bytes(b"weights")
    assert not any(folder.exists() for folder in folders)
    assert not (tmp_path / RECORD).exists()


def test_what_still_writes_there_ends_with_the_run(tmp_path: pathlib.Path) -> None:
    with scratch_folders(tmp_path) as scratch:
        log = pathlib.Path(scratch.session) / "log"
        writer = start_writer(log)
        own = log.open("rb")  # the run itself goes on to report
    own.close()
    assert writer.wait(timeout=WAIT_S) == -signal.SIGKILL


def test_a_killed_run_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as run:
        assert run.stdout is not None
        session, weights = (pathlib.Path(run.stdout.readline().strip()) for _ in range(2))
        writer = start_writer(session / "log")
        guards = psutil.Process(run.pid).children()
        run.kill()
    psutil.wait_procs(guards, timeout=WAIT_S)
    assert writer.wait(timeout=WAIT_S) == -signal.SIGKILL
    assert not session.exists()
    assert not weights.exists()


def test_what_a_killed_guard_left_is_removed_by_the_next_run(tmp_path: pathlib.Path) -> None:
    old = Scratch(session=str(tmp_path / "session"), weights=str(tmp_path / "weights"))
    for folder in (old.session, old.weights):
        pathlib.Path(folder).mkdir()
    (tmp_path / RECORD).write_bytes(msgspec.json.encode(old))
    with scratch_folders(tmp_path) as new:
        assert new != old
        assert not pathlib.Path(old.session).exists()
        assert not pathlib.Path(old.weights).exists()
    remove_leftovers(tmp_path)  # nothing is left to do


def test_a_unix_socket_fits_below_the_session_folder(tmp_path: pathlib.Path) -> None:
    below = "/session_2026-12-31_23-59-59_999999_9999999/sockets/plasma_store"
    with scratch_folders(tmp_path) as scratch:
        assert len(scratch.session + below) < 107
