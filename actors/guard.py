"""A small process that cleans up after a run, however the run ended: even after ``kill -9``.

Run as a file of its own, ``guard.py FOLDER...``: it imports nothing but the standard library and
waits for the end of its standard input, which comes when the run, its parent, closes the other end
of the pipe or is gone. Then it ends every other process that has a file open below one of the
folders, and removes the folders. Ray's processes write their logs below the session folder, and
what they start inherits those files; most of them die with the run by themselves, but two of Ray's
agents would try for a minute to report its death to a cluster that is gone.
"""

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

MAX_ROUNDS = 2
KILL_S = 10.0
"""Longest wait for a killed process to be gone."""


def main(folders: list[str]) -> None:
    """Wait for the end of the run, and leave nothing of it."""
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Meant for the run, where they are sent to all of its processes.
        signal.signal(stop, signal.SIG_IGN)
    run_pid = os.getppid()
    sys.stdin.read()
    clean_up(folders, sparing=run_pid)


def clean_up(folders: Sequence[str], *, sparing: int) -> None:
    """End all but one of the processes that use the folders, and remove the folders."""
    end_users(folders, sparing=sparing)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def end_users(folders: Sequence[str], *, sparing: int) -> None:
    """End all but one of the processes that use the folders."""
    for _ in range(MAX_ROUNDS):  # one may have started another meanwhile
        end_processes(pid for pid in users_of(folders) if pid != sparing)


def users_of(folders: Iterable[str]) -> list[int]:
    """Return the processes that have a file open below one of the folders."""
    below = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _has_open(pid, below)]


def end_processes(pids: Iterable[int]) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [], KILL_S)
            finally:
                os.close(descriptor)


def _has_open(pid: int, below: tuple[str, ...]) -> bool:
    with suppress(OSError):  # it has just ended, or is somebody else's
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(below):
                    return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
