"""Prompts from a JSONL file, in an order that depends on the seed alone.

The file is mapped into memory and indexed by byte offsets, so a row costs no read call on the
caller's event loop. It must not be cut while a run uses it; its ``fingerprint`` tells a later run
whether it is still the same.
"""

import functools
import hashlib
import mmap
import pathlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from opdkit.protocols.errors import ConfigError, PromptError
from opdkit.protocols.ids import Ordinal

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_decode_json = msgspec.json.Decoder().decode


class JsonlPrompts:
    """A ``PromptSource``: one JSON object a line, with ``messages``.

    Ordinals count trajectories: each row of an epoch stands for ``samples_per_prompt`` of them in
    sequence, then the next epoch begins in another order. Lines that are blank are no rows.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        seed: int = 0,
        shuffle: bool = True,
        samples_per_prompt: int = 1,
        num_epochs: int | None = None,
    ) -> None:
        """Index the file.

        Raises:
            ConfigError: there is no such file, or it holds no row.
        """
        self._path = pathlib.Path(path)
        self._seed = seed
        self._shuffle = shuffle
        self._samples_per_prompt = samples_per_prompt
        self._num_epochs = num_epochs
        self._data = _map(self._path)
        self._starts, self._lines = _index(self._data)
        if not len(self._starts):
            raise ConfigError(f"{path} holds no rows")
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """Number of rows in one epoch."""
        return len(self._starts)

    @property
    def num_ordinals(self) -> int | None:
        """Trajectories in all epochs; None: without end."""
        if self._num_epochs is None:
            return None
        return self._num_epochs * len(self) * self._samples_per_prompt

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file as it was indexed."""
        return hashlib.sha256(self._data).hexdigest()

    def row(self, ordinal: Ordinal) -> tuple[str, dict[str, object]]:
        """Return (``file:line``, columns) of the row drawn at this place.

        Raises:
            PromptError: the row is no usable prompt. The message names file and line.
            IndexError: the ordinal lies beyond the last epoch.
        """
        if ordinal < 0 or (self.num_ordinals is not None and ordinal >= self.num_ordinals):
            raise IndexError(f"ordinal is {ordinal}, but must be in [0, {self.num_ordinals})")
        epoch, place = divmod(ordinal // self._samples_per_prompt, len(self))
        return self.row_in_file(int(self._order(epoch)[place]) if self._shuffle else place)

    def row_in_file(self, index: int) -> tuple[str, dict[str, object]]:
        """Return (``file:line``, columns) of the row at this place in the file.

        Raises:
            PromptError: as ``row``.
        """
        name = f"{self._path}:{self._lines[index]}"
        start = int(self._starts[index])
        end = self._data.find(b"\n", start)
        line = self._data[start : end if end >= 0 else len(self._data)]
        return name, parse_row(line, name=name)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return permutation(len(self), seed=self._seed, epoch=epoch)


def permutation(num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of rows in an epoch: [num_rows] row indices.

    Rows are sorted by a counter-based hash, SplitMix64 (Steele et al., OOPSLA 2014, section 5) of
    the row's index under a key made of seed and epoch; equal hashes keep the file's order. It is
    integer arithmetic modulo 2**64 throughout, so every machine and version gives the same order.
    """
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    hashes = _mix(key + np.arange(num_rows).astype(np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _mix(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def parse_row(line: bytes, *, name: str) -> dict[str, object]:
    """Read one line and check that its ``messages``, and ``tools`` if any, make a prompt.

    Raises:
        PromptError: naming the line and what is wrong with it.
    """
    try:
        row = _decode_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PromptError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise PromptError(f"{name} is nested too deeply") from None
    if not isinstance(row, dict):
        raise PromptError(f"{name} is a JSON {type(row).__name__}, but must be an object")
    if "messages" not in row:
        raise PromptError(
            f"{name} has no 'messages', only {', '.join(map(repr, row)) or 'nothing'}"
        )
    _check_messages(row["messages"], name)
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise PromptError(f"{name}: tools must be a list or null, got {tools!r}")
    return row


def _check_messages(messages: Any, name: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"{name}: messages must be a list that is not empty")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"{name}: messages[{index}] must be an object with a role")
        content = message.get("content")
        if message["role"] != "assistant" and not isinstance(content, str | list):
            raise PromptError(
                f"{name}: messages[{index}] of {message['role']!r} must have content, "
                f"got {content!r}"
            )
    # The reply at the end is dropped before the student speaks; something must be left to answer.
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        raise PromptError(f"{name}: messages holds only a reply, nothing to reply to")


def _map(path: pathlib.Path) -> mmap.mmap:
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} holds a NUL character, which no path may")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:  # What mmap raises for an empty file.
        raise ConfigError(f"{path} is empty, but must hold a row") from None


def _index(data: mmap.mmap) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the byte offsets and the line numbers (from 1) of the lines that are not blank."""
    starts: list[int] = []
    lines: list[int] = []
    start = len(_BYTE_ORDER_MARK) if data[:3] == _BYTE_ORDER_MARK else 0
    data.seek(start)
    for number, line in enumerate(iter(data.readline, b""), 1):
        if not line.isspace():
            starts.append(start)
            lines.append(number)
        start += len(line)
    return np.array(starts, np.int64), np.array(lines, np.int64)
