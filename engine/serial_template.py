"""A chat template for threads: one call at a time."""

import threading
from collections.abc import Mapping, Sequence

from opdkit.protocols.roles import ChatTemplate


class SerialTemplate:
    """A ``ChatTemplate`` whose calls wait for each other, in whatever threads they run.

    Tokenizers hold state while they work: one that two threads share may raise, or mix them up.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Render, alone."""
        with self._lock:
            return self._template.render(messages, tools=tools)

    def encode(self, text: str) -> list[int]:
        """Encode, alone."""
        with self._lock:
            return self._template.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode, alone."""
        with self._lock:
            return self._template.decode(token_ids)
