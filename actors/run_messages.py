"""What the foreground and the coordinator tell each other."""

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

from opdkit.protocols.messages import Message, ProgressRecord

Show = Callable[[AsyncIterator[ProgressRecord]], Awaitable[None]]
"""Shows progress records until there are no more."""


class Resumption(Message, frozen=True, kw_only=True):
    """Where a run goes on."""

    state: bytes
    """The engine's part of the checkpoint."""
    trainer_path: str
    """Folder of the trainer's part."""


class RunOutcome(Message, frozen=True, kw_only=True):
    """How a run ended. No error and not stopped: it reached its end."""

    error: str = ""
    """One line: the class and message of the first cause."""
    traceback: str = ""
    was_stopped: bool = False


def failed(error: BaseException) -> RunOutcome:
    """Return the outcome of a run that this error ended."""
    first: BaseException = error
    # Ray's error for one from another process holds that; its own text is a whole traceback.
    while isinstance(inner := getattr(first, "cause", None), BaseException):
        first = inner
    message = f"{type(first).__name__}: {first}"
    return RunOutcome(
        error=" ".join(message.split()),
        traceback="".join(traceback.format_exception(error)),
    )
