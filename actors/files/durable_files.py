"""Writing so that a crash leaves the old file or the new one, never half of one."""

import os
import pathlib


def write_durably(path: pathlib.Path, data: bytes) -> None:
    """Write a whole file under a temporary name, then move it into place."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def append_line(path: pathlib.Path, line: bytes, *, durable: bool = False) -> None:
    """Append a line in one write."""
    with path.open("ab", buffering=0) as file:
        file.write(line + b"\n")
        if durable:
            os.fsync(file.fileno())


def sync(path: pathlib.Path) -> None:
    """Bring one file, or the entries of one directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: pathlib.Path) -> None:
    """Bring everything below a directory to the disk, whoever on this machine wrote it."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_file() or path.is_dir():
            sync(path)
    sync(directory)
