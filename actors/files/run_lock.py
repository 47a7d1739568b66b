"""One run at a time in a directory."""

import fcntl
import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

from opdkit.protocols.errors import ConfigError


@contextmanager
def hold_lock(path: pathlib.Path) -> Iterator[None]:
    """Hold an advisory lock on a file that names this process; gone with it, however it ends.

    Raises:
        ConfigError: another process holds it; the message names its pid.
    """
    with path.open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ConfigError(
                f"job.run_dir is {str(path.parent)!r}, but the run of process {holder} uses it: "
                "give this one another job.name or job.run_dir, or end that one"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
