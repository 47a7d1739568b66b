"""What a turn sends, given what was sent and sampled before it.

Recorded ids are never derived again from text. The template renders the conversation as it was
and as it is now; only what comes after the recorded reply is taken from the rendering. If the new
conversation is no extension of the recorded one (compressed, edited, or a template that strips
earlier thinking), the turn starts a new sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opdkit.protocols.roles import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class History:
    """The conversation at the end of the last recorded reply."""

    rendered: list[int]
    """The template's ids of all messages before the reply."""
    num_messages: int
    """How many those are: the index of the reply's message."""
    reply_text: str
    """Text of the whole assistant message that stands for the recorded ids."""


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """How the next reply continues the record."""

    rendered: list[int]
    """The template's ids of all messages before the next reply's."""
    prompt: list[int] | None
    """Of a new sequence; None: the recorded one goes on."""
    insertion: list[int]
    """Ids to add to the recorded sequence."""
    in_turn: bool
    """The next reply goes on within the recorded one's message."""

    def num_prompt_tokens(self, num_recorded: int) -> int:
        """Return the length of what is sent."""
        return num_recorded + len(self.insertion) if self.prompt is None else len(self.prompt)


def plan_turn(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[object],
    recorded: Sequence[int],
    history: History | None,
) -> TurnPlan:
    """Decide what to send. Blocking: renders the conversation up to twice.

    Args:
        template: The student's.
        messages: The conversation; a last message of the assistant is to be continued.
        tools: For the template.
        recorded: All ids of the current sequence.
        history: Where the record stands; None: nothing was sampled yet.
    """
    opened = messages[-1] if messages[-1]["role"] == "assistant" else None
    closed = messages[:-1] if opened is not None else messages
    open_text = _text(opened) if opened is not None else ""
    rendered = template.render(closed, tools=tools)

    if history is not None and _continues(history, closed, rendered, opened, open_text):
        added = open_text.removeprefix(history.reply_text)
        insertion = template.encode(added) if added else []
        if _is_closed(template, recorded):
            # The student ended its reply, and is to go on without having ended it.
            prompt = [*recorded[:-1], *insertion]
            return TurnPlan(rendered=rendered, prompt=prompt, insertion=[], in_turn=False)
        return TurnPlan(rendered=rendered, prompt=None, insertion=insertion, in_turn=True)

    opening = template.encode(open_text) if open_text else []
    suffix = None
    if history is not None:
        suffix = _suffix(template, closed, tools, rendered, recorded, history)
    if suffix is None:
        prompt = [*rendered, *opening]
        return TurnPlan(rendered=rendered, prompt=prompt, insertion=[], in_turn=False)
    insertion = [*suffix, *opening]
    return TurnPlan(rendered=rendered, prompt=None, insertion=insertion, in_turn=False)


def _continues(
    history: History,
    closed: Sequence[Mapping[str, Any]],
    rendered: list[int],
    opened: Mapping[str, Any] | None,
    open_text: str,
) -> bool:
    return (
        opened is not None
        and len(closed) == history.num_messages
        and rendered == history.rendered
        and open_text.startswith(history.reply_text)
    )


def _suffix(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[object],
    rendered: list[int],
    recorded: Sequence[int],
    history: History,
) -> list[int] | None:
    """Return the ids that follow the recorded reply, or None if the record is no prefix.

    Where the reply ends in the rendering is found by rendering another one in its place: what both
    have in common at the end comes after it. What comes before must decode to the reply's text.
    """
    place, text = history.num_messages, history.reply_text
    before = len(history.rendered)
    if len(messages) <= place or messages[place]["role"] != "assistant":
        return None
    # Ends unlike the reply, so that the common end does not reach into it.
    other = {**messages[place], "content": "!" if text.rstrip().endswith(".") else "."}
    probe = template.render([*messages[:place], other, *messages[place + 1 :]], tools=tools)
    if probe[:before] != history.rendered:
        return None
    end = len(rendered) - _common_suffix(rendered, probe[before:])
    if not _says(template, rendered[:end], text, after=history.rendered):
        return None
    suffix = rendered[end:]
    if not _is_closed(template, recorded):
        return suffix
    if suffix[:1] != list(recorded[-1:]):
        return None
    return suffix[1:]


def _says(
    template: ChatTemplate, token_ids: Sequence[int], text: str, *, after: Sequence[int]
) -> bool:
    """Tell whether ids are ``after`` and then a text; a template may strip white space off it."""
    texts = (text, text.strip())
    if list(token_ids[: len(after)]) == list(after):
        return template.decode(token_ids[len(after) :]) in texts
    # The first letters of the reply may be merged with what stands before them.
    whole, start = template.decode(token_ids), template.decode(after)
    return whole in [start + text for text in texts]


def _is_closed(template: ChatTemplate, recorded: Sequence[int]) -> bool:
    """Tell whether the record ends with a special id, such as the end of sequence."""
    return template.decode(list(recorded[-1:])) == ""


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
