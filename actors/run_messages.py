"""What the foreground and the coordinator tell each other."""

from opdkit.protocols.messages import Message


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
