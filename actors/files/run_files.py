"""The directory of a run: configuration, checkpoints, dead letters.

Layout: docs/run_directory.md. Opening it takes its lock, finds the newest complete checkpoint and
cuts back what was written after it, so that the directory reads as one run. Everything here blocks;
the coroutines do their work in a thread.
"""

import asyncio
import logging
import pathlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from opdkit.actors.files.config_file import format_job, parse_yaml
from opdkit.actors.files.durable_files import append_line, sync, sync_tree, write_durably
from opdkit.actors.files.prompt_files import JsonlPrompts
from opdkit.actors.files.resume_rules import check_resume
from opdkit.actors.files.run_lock import hold_lock
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import decode_job
from opdkit.protocols.errors import ConfigError
from opdkit.protocols.messages import DeadSample
from opdkit.protocols.roles import PolicyTrainer

_log = logging.getLogger(__name__)
_STEP_NAME = re.compile(r"step-[0-9]{6,}")
_SEAL_NAME = "COMPLETE"


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a checkpoint's ``COMPLETE``: what must be there for it to count."""

    step: int
    file_bytes: dict[str, int]
    """Size of every file, by its path within the checkpoint."""
    dead_letter_bytes: int
    """Size of the run's dead letters when the engine's state was taken."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint on disk."""

    step: int
    path: pathlib.Path
    state: bytes
    """The engine's part."""
    dead_letter_bytes: int

    @property
    def trainer_path(self) -> str:
        """Directory for ``PolicyTrainer.load``."""
        return str(self.path / "trainer")


class RunDirectory:
    """A ``RunStore``: owns one run's files while its lock is held."""

    def __init__(self, path: pathlib.Path, *, keep: int) -> None:
        """Name the parts; ``open`` is the way in."""
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.dead_letters = path / "dead_letters.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.plot = path / "divergence.png"
        self.export = path / "export"
        self.resumed: Checkpoint | None = None
        """Where this run continues; None: it begins."""
        self._keep = keep

    @classmethod
    @contextmanager
    def open(cls, spec: JobSpec) -> Iterator["RunDirectory"]:
        """Take the job's directory, new or to be continued, until the end of the block.

        Raises:
            ConfigError: it is in use, cannot be written, belongs to another job, or all of its
                checkpoints are damaged.
        """
        directory = cls(pathlib.Path(spec.job.directory), keep=spec.checkpoint.keep)
        try:
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"job.run_dir is {spec.job.directory!r}, but cannot be written: {error.strerror}"
            ) from None
        with hold_lock(directory.path / "lock"):
            directory._resume(spec)
            yield directory

    async def save(self, step: int, state: bytes, trainer: PolicyTrainer) -> None:
        """Write checkpoint ``step`` and drop the oldest; a crash at any point leaves the last."""
        partial = self.checkpoints / f".partial-{_name_of(step)}"
        dead_letter_bytes = await asyncio.to_thread(_begin, partial, state, self.dead_letters)
        await trainer.save(str(partial / "trainer"))
        await asyncio.to_thread(self._complete, partial, step, dead_letter_bytes)

    async def bury(self, dead: DeadSample) -> None:
        """Append to the dead letters."""
        line = msgspec.json.encode(dead)
        await asyncio.to_thread(append_line, self.dead_letters, line, durable=True)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; None: there is none."""
        for path in reversed(self._on_disk()):
            if (seal := _read_seal(path)) is not None:
                return Checkpoint(
                    step=seal.step,
                    path=path,
                    state=(path / "state.msgpack").read_bytes(),
                    dead_letter_bytes=seal.dead_letter_bytes,
                )
            _log.warning("%s is not complete and is passed over", path)
        return None

    def _resume(self, spec: JobSpec) -> None:
        for partial in self.checkpoints.glob(".partial-*"):
            # A sealed one only lacked its name: the crash came within the last two calls of a save.
            if (seal := _read_seal(partial)) is not None:
                self._put_in_place(partial, seal.step)
            else:
                shutil.rmtree(partial)
        self.resumed = self.newest()
        fingerprints = _fingerprints(spec)
        if self.resumed is not None:
            self._check_is_same(spec, fingerprints)
        else:
            self._check_is_new()
        _cut(self.dead_letters, self.resumed.dead_letter_bytes if self.resumed else 0)
        write_durably(self.path / "job.yaml", format_job(spec).encode())
        write_durably(self.path / "data.json", msgspec.json.encode(fingerprints))

    def _check_is_same(self, spec: JobSpec, fingerprints: dict[str, str]) -> None:
        saved_job = self.path / "job.yaml"
        saved = decode_job(parse_yaml(saved_job.read_text(encoding="utf-8"), name=str(saved_job)))
        check_resume(saved, spec)
        saved_data: dict[str, str] = msgspec.json.decode((self.path / "data.json").read_bytes())
        if saved_data["data.train"] != fingerprints["data.train"]:
            raise ConfigError(
                f"data.train is {spec.data.train!r}, but its content is not what this run began "
                "with: give it back, or start a new run in another job.run_dir"
            )

    def _check_is_new(self) -> None:
        """Refuse to begin anew over damaged checkpoints: it would cut all that the run recorded.

        One without any seal is no damage, but a save that was interrupted.
        """
        damaged = [path.name for path in self._on_disk() if (path / _SEAL_NAME).exists()]
        if damaged:
            raise ConfigError(
                f"job.run_dir is {str(self.path)!r}, but its checkpoints are damaged: "
                f"{', '.join(damaged)} in {str(self.checkpoints)!r} lack files or have others than "
                "were saved; remove the folder to begin anew, or choose another job.run_dir"
            )

    def _complete(self, partial: pathlib.Path, step: int, dead_letter_bytes: int) -> None:
        files = [path for path in partial.rglob("*") if path.is_file()]
        seal = Seal(
            step=step,
            file_bytes={str(path.relative_to(partial)): path.stat().st_size for path in files},
            dead_letter_bytes=dead_letter_bytes,
        )
        sync_tree(partial)
        write_durably(partial / _SEAL_NAME, msgspec.json.encode(seal))
        self._put_in_place(partial, step)
        self._drop_before(step)

    def _put_in_place(self, partial: pathlib.Path, step: int) -> None:
        final = self.checkpoints / _name_of(step)
        if final.exists():  # A damaged one, or one of the same step from before the resume.
            shutil.rmtree(final)
        partial.rename(final)
        sync(self.checkpoints)

    def _drop_before(self, step: int) -> None:
        # A damaged one must not take the place of one to resume from.
        complete = [path for path in self._on_disk() if _read_seal(path) is not None]
        for path in self._on_disk():
            if _step_of(path) < step and path not in complete[-self._keep :]:
                shutil.rmtree(path)

    def _on_disk(self) -> list[pathlib.Path]:
        paths = self.checkpoints.glob("step-*")
        return sorted(filter(_is_checkpoint, paths), key=_step_of)


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _is_checkpoint(path: pathlib.Path) -> bool:
    return _STEP_NAME.fullmatch(path.name) is not None and path.is_dir()


def _step_of(path: pathlib.Path) -> int:
    return int(path.name.removeprefix("step-"))


def _begin(partial: pathlib.Path, state: bytes, dead_letters: pathlib.Path) -> int:
    if partial.exists():  # Left of a save that was cancelled.
        shutil.rmtree(partial)
    partial.mkdir()
    (partial / "state.msgpack").write_bytes(state)
    return dead_letters.stat().st_size if dead_letters.exists() else 0


def _read_seal(path: pathlib.Path) -> Seal | None:
    try:
        seal = msgspec.json.decode((path / _SEAL_NAME).read_bytes(), type=Seal)
        sizes = {name: (path / name).stat().st_size for name in seal.file_bytes}
    except (FileNotFoundError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    return seal if sizes == seal.file_bytes else None


def _cut(path: pathlib.Path, num_bytes: int) -> None:
    if path.exists() and path.stat().st_size > num_bytes:
        with path.open("r+b") as file:
            file.truncate(num_bytes)


def _fingerprints(spec: JobSpec) -> dict[str, str]:
    return {"data.train": JsonlPrompts(spec.data.train).fingerprint}
