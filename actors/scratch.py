"""Temporary folders of a run: Ray's session and the shared memory in which weights are handed over.

Both vanish with the run, and so does every process that writes there: a guard sees to it, even
when the run is killed. Where the guard was killed too, as when a container is stopped, the names
that are kept in the run directory, under its lock, tell the next run there what to remove.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from opdkit.actors import guard
from opdkit.actors.files.durable_files import write_durably

RECORD = "scratch.json"
SHARED_MEMORY = Path("/dev/shm")


class Scratch(msgspec.Struct, frozen=True, kw_only=True):
    """The folders."""

    session: str
    """Ray's sockets and logs. Short: the path of a Unix socket has 107 bytes at most."""
    weights: str
    """Published weights, in memory."""


@contextmanager
def scratch_folders(run_directory: Path) -> Iterator[Scratch]:
    """Make both folders, after removing those of a killed run. The caller holds the run's lock."""
    record = run_directory / RECORD
    remove_leftovers(run_directory)
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    scratch = Scratch(
        session=tempfile.mkdtemp(prefix="opdkit-"),
        weights=tempfile.mkdtemp(prefix="opdkit-weights-", dir=memory),
    )
    write_durably(record, msgspec.json.encode(scratch))
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, scratch.session, scratch.weights],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Ctrl-C at a terminal is for the run, which the guard outlives.
        start_new_session=True,
    )
    try:
        yield scratch
    finally:
        watching.communicate()
        # In case that the guard was killed.
        guard.clean_up((scratch.session, scratch.weights), sparing=os.getpid())
        record.unlink()


def remove_leftovers(run_directory: Path) -> None:
    """Remove the folders that the record names, and the record."""
    record = run_directory / RECORD
    if not record.exists():
        return
    scratch = msgspec.json.decode(record.read_bytes(), type=Scratch)
    for folder in (scratch.session, scratch.weights):
        shutil.rmtree(folder, ignore_errors=True)
    record.unlink()
