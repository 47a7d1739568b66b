"""Temporary folders vanish with the run, or with the next one."""

import os
import pathlib
import signal
import subprocess
import sys
import time

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


def until_guarding(guard: psutil.Process) -> None:
    """Wait until the guard reads its input: then it has set what it ignores."""
    ignored = pathlib.Path(f"/proc/{guard.pid}/status")
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        [line] = [line for line in ignored.read_text().splitlines() if line.startswith("SigIgn")]
        if int(line.split()[1], 16) & (1 << (signal.SIGTERM - 1)):
            return
        time.sleep(0.01)  # another process has no event for it


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


def test_a_killed_guard_is_made_up_for(tmp_path: pathlib.Path) -> None:
    with scratch_folders(tmp_path) as scratch:
        writer = start_writer(pathlib.Path(scratch.session) / "log")
        [guard] = [child for child in psutil.Process().children() if child.pid != writer.pid]
        guard.kill()
    assert writer.wait(timeout=WAIT_S) == -signal.SIGKILL
    assert not pathlib.Path(scratch.session).exists()
    assert not pathlib.Path(scratch.weights).exists()
    assert not (tmp_path / RECORD).exists()


def test_a_signal_to_all_of_the_run_does_not_end_the_guard(tmp_path: pathlib.Path) -> None:
    with scratch_folders(tmp_path) as scratch:
        writer = start_writer(pathlib.Path(scratch.session) / "log")
        [guard] = [child for child in psutil.Process().children() if child.pid != writer.pid]
        until_guarding(guard)
        guard.terminate()
    assert writer.wait(timeout=WAIT_S) == -signal.SIGKILL


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
