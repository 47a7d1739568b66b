"""A chat template and tokenizer that fit on a page."""

from collections.abc import Mapping, Sequence

END = 900
"""Closes a message; the end-of-sequence id of a student that ends its reply properly."""
ROLES = {"system": 901, "user": 902, "assistant": 903, "tool": 904}
FIRST_LETTER = 1000


class LetterTemplate:
    """A ``ChatTemplate`` with one id a letter, and spellings that encoding never gives.

    With ``spellings`` {(1, 2): "x"} the ids 1, 2 decode to "x", which encodes to another id: code
    that derives ids from text is found out.
    """

    def __init__(
        self,
        spellings: Mapping[tuple[int, ...], str] | None = None,
        *,
        strips_thinking: bool = False,
    ) -> None:
        """Teach it spellings; ``strips_thinking``: from all but the last turn, like Qwen3's."""
        self._spellings = dict(spellings or {})
        self._strips_thinking = strips_thinking

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Return ``role letters END`` for each message, and the assistant's role."""
        roles = [message["role"] for message in messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        token_ids: list[int] = []
        for index, message in enumerate(messages):
            content = str(message["content"] or "")
            if self._strips_thinking and index < last_user:
                content = content.rpartition("</think>")[2]
            token_ids += [ROLES[str(message["role"])], *self.encode(content), END]
        return [*token_ids, ROLES["assistant"]]

    def encode(self, text: str) -> list[int]:
        """Return one id a letter."""
        return [FIRST_LETTER + ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; the longest spelling wins, special ids have none."""
        text, index = "", 0
        while index < len(token_ids):
            length, piece = self._piece(tuple(token_ids[index:]))
            text += piece
            index += length
        return text

    def _piece(self, token_ids: tuple[int, ...]) -> tuple[int, str]:
        fitting = [ids for ids in self._spellings if ids and token_ids[: len(ids)] == ids]
        if fitting:
            longest = max(fitting, key=len)
            return len(longest), self._spellings[longest]
        if token_ids[0] >= FIRST_LETTER:
            return 1, chr(token_ids[0] - FIRST_LETTER)
        is_special = token_ids[0] == END or token_ids[0] in ROLES.values()
        return 1, "" if is_special else f"<{token_ids[0]}>"
