"""The command as a user calls it: in a process and a folder of its own, with everything it starts.

Whatever a run starts has the run's working directory, by which it is found: Ray's and vLLM's
processes rename themselves and overwrite their environment, but stay where they were started.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # publishes no types
import yaml  # type: ignore[import-untyped]  # ships no type information

SOURCE = Path(__file__).parents[2] / ".src"
FAULTS = Path(__file__).parent / "faults"
SHARED_MEMORY = Path("/dev/shm")
START_S = 300.0
"""Longest wait for a run to get anywhere: its cores may be taken."""
FIND_S = 10.0
"""Longest wait for a process that must be there."""
POLL_S = 0.05
"""Processes that are not our children have no event that says they ended."""


class Place:
    """A folder from which jobs are run, and a folder for what they write elsewhere."""

    def __init__(self, folder: Path) -> None:
        # Short: the path of a Unix socket has 107 bytes at most.
        self.temporary = Path(tempfile.mkdtemp(prefix="oi-"))
        self.folder = folder
        self._shared: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell would hold."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": os.pathsep.join((str(SOURCE), str(FAULTS))),
            "TMPDIR": str(self.temporary),
        }

    def write_job(self, values: Mapping[str, Any], *, name: str = "job.yaml") -> str:
        """Write a configuration file; return its name."""
        (self.folder / name).write_text(yaml.safe_dump(dict(values)))
        return name

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call the command and wait for its end."""
        return subprocess.run(
            [sys.executable, "-m", "opdkit.actors.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_S,
        )

    def processes(self) -> list[psutil.Process]:
        """Return all processes that were started from this folder and live."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def leftovers(self) -> list[str]:
        """Name what is left of the runs: processes, temporary files, shared memory."""
        processes = [f"process {title_of(process)}" for process in self.processes()]
        files = [str(path) for path in self.temporary.rglob("*")]
        shared = [str(path) for name in self._shared if (path := SHARED_MEMORY / name).exists()]
        return [*processes, *files, *shared]

    def note_shared_memory(self) -> None:
        """Remember what the runs have there now; afterwards nothing tells whose it was."""
        for process in self.processes():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._shared.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", maps))
        for record in self.folder.glob("runs/*/scratch.json"):
            self._shared.add(Path(json.loads(record.read_bytes())["weights"]).name)

    def until_gone(self, *, within_s: float) -> list[str]:
        """Wait until nothing is left of the runs; return what is left after all."""
        deadline_s = time.monotonic() + within_s
        while (left := self.leftovers()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return left

    def remove(self) -> None:
        """End what a failed test left."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_here = bool(process.cwd() == str(self.folder))
            return is_here and bool(process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def title_of(process: psutil.Process | None) -> str:
    """Return the command line, by which Ray and vLLM say what a process is."""
    try:
        return " ".join(process.cmdline()) if process else ""
    except psutil.Error:
        return "(it has just ended)"


class RunningJob:
    """A ``run --json`` in progress."""

    def __init__(self, place: Place, *arguments: str, fault: str = "") -> None:
        self.place = place
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in ``close``
        self.process = subprocess.Popen(
            [sys.executable, "-m", "opdkit.actors.cli", "run", *arguments, "--json"],
            cwd=place.folder,
            env={**place.environment, "OPDKIT_TEST_FAULT": fault},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a group of its own, as a shell's job has
        )
        self.records: list[dict[str, Any]] = []
        self._lines = self._read()

    def until(self, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read on until a record is as wanted."""
        for record in self._lines:
            if is_reached(record):
                return record
        raise AssertionError(f"the run ended before: {self.end()}")

    def until_step(self, step: int) -> int:
        """Read on until so many steps are done; return how many are."""
        found = self.until(lambda r: r["kind"] == "progress" and r["step"] >= step)
        return int(found["step"])

    def find_all(self, title: str, *, under: str = "") -> list[psutil.Process]:
        """Return the processes of this title, whose parents' titles hold ``under``."""
        return [
            process
            for process in self.place.processes()
            if title in title_of(process) and under in title_of(process.parent())
        ]

    def kill(self, title: str, *, under: str = "") -> None:
        """End one part as an exhausted memory does."""
        deadline_s = time.monotonic() + FIND_S
        # A title that is just being rewritten reads as another.
        while not (found := self.find_all(title, under=under)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        [process] = found
        process.kill()

    def end(self, *, within_s: float | None = None) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was written to stderr."""
        started_s = time.monotonic()
        for _ in self._lines:
            pass
        code = self.process.wait()
        passed_s = time.monotonic() - started_s
        assert within_s is None or passed_s < within_s, f"it took {passed_s:.1f} s to end"
        self._errors.seek(0)
        return code, self._errors.read()

    def close(self) -> None:
        """Kill what still runs, and close the files."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            self.place.note_shared_memory()
            yield self.records[-1]


@contextmanager
def running(place: Place, *arguments: str, fault: str = "") -> Generator[RunningJob]:
    """Start a run, and end it with the block if it goes on; ``fault``: see ``faults/``."""
    with closing(RunningJob(place, *arguments, fault=fault)) as job:
        yield job
