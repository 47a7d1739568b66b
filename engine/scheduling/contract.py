"""What a scheduler owns: everything that happens between the turns of a trajectory.

A user subclasses ``Scheduler`` and overrides the hooks that matter. One instance serves all
trajectories, so state of a trajectory is kept by ``request.uuid``. A hook may be ``async def``
(awaited on the loop that all trajectories share) or plain ``def`` (run in a thread of its own);
either way it has the deadline ``rollout.hook_timeout_s``.
"""

import copy
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import uuid4

import msgspec

from opdkit.protocols.errors import PromptError
from opdkit.protocols.messages import Segment, VersionSpan

T = TypeVar("T")
MaybeAsync: TypeAlias = T | Awaitable[T]

ChatMessage: TypeAlias = dict[str, Any]
"""``role``, ``content`` and what else the dataset or the scheduler puts in."""


@dataclass(kw_only=True)
class RolloutRequest:
    """A conversation in progress. Hooks may change it in place."""

    messages: list[ChatMessage]
    data_dict: dict[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the dataset row."""
    uuid: str = field(default_factory=lambda: uuid4().hex)
    """Of this attempt at this trajectory; the same over all its turns."""
    tools: list[Any] = field(default_factory=list[Any])
    """Tool descriptions for the chat template."""
    infos: dict[str, Any] = field(default_factory=dict[str, Any])
    """``rollout_infos`` merged so far."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "RolloutRequest":
        """Copy a dataset row, without the response that it may end with.

        Raises:
            PromptError: ``messages`` is no list of messages, or holds nothing but a response;
                ``tools`` is there, but no list.
        """
        columns = copy.deepcopy(dict(row))
        prompt = _checked_messages(columns.get("messages"))
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
        if not prompt:
            raise PromptError(f"messages hold no prompt: {columns['messages']!r}")
        return cls(messages=prompt, data_dict=columns, tools=_checked_tools(columns.get("tools")))

    def copy(self) -> "RolloutRequest":
        """Return an independent request with the same id."""
        return copy.deepcopy(self)


def _checked_messages(value: object) -> list[ChatMessage]:
    try:
        messages = msgspec.convert(value, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise PromptError(f"messages: {error}") from None
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise PromptError(f"messages[{index}] has no role that is a text: {message!r}")
    return messages


def _checked_tools(value: object) -> list[Any]:
    if value is None:
        return []
    try:
        return msgspec.convert(value, list[Any])
    except msgspec.ValidationError:
        raise PromptError(f"tools must be a list or null, got {value!r}") from None


@dataclass(frozen=True, kw_only=True)
class ReplyMessage:
    """The text of a reply. For people and parsers: training uses the ids."""

    content: str
    role: str = "assistant"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One reply of the student."""

    message: ReplyMessage
    token_ids: list[int]
    """As sampled, an end-of-sequence id included."""
    logprobs: list[float]
    """One a token, natural log, of the distribution sampled from."""
    finish_reason: str
    """``stop`` or ``length``."""
    prompt_token_ids: list[int]
    """The whole history, as sent."""
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutOutput:
    """What a trajectory came to."""

    uuid: str
    """Of its requests."""
    messages: list[ChatMessage]
    segments: tuple[Segment, ...]
    """The training sequences."""
    response_token_ids: list[list[int]]
    """A list a turn; a reply that continues an assistant message extends that turn's list."""
    response_loss_mask: list[list[int]]
    """Shaped like ``response_token_ids``: 1 for sampled tokens, 0 for inserted ones."""
    rollout_logprobs: list[list[float]]
    """One a token with mask 1; empty if the scheduler's own did not fit its masks."""
    rollout_infos: dict[str, Any]
    """``num_turns`` is the engine's."""


class RolloutConfig(Protocol):
    """What ``Scheduler.run`` drives a trajectory with. One call at a time."""

    @property
    def max_turns(self) -> int:
        """The smaller of ``rollout.max_turns`` and the scheduler's own."""
        ...

    async def generate(self, request: RolloutRequest) -> Choice:
        """Sample one reply, record its ids and add its text to the request's messages.

        Raises:
            PromptError: the conversation leaves no room for a token.
        """
        ...

    async def run_turns(self, request: RolloutRequest) -> RolloutOutput:
        """Run the standard loop, with the hooks of the scheduler, to its end."""
        ...

    def output(self, request: RolloutRequest) -> RolloutOutput:
        """Return everything recorded so far."""
        ...


class Scheduler:
    """The hooks, with what happens if they are not overridden.

    Arguments come by position: an override may name them as it likes.
    """

    max_turns: int | None = None
    """This scheduler's own limit; None: only ``rollout.max_turns`` binds."""

    def on_trajectory_start(self, requests: list[RolloutRequest], /) -> MaybeAsync[None]:
        """Prepare a trajectory, before its first generation.

        Args:
            requests: A list of one. The request may be changed in place.
        """
        return None

    def on_turn_end(
        self, request: RolloutRequest, choice: Choice, turn: int, /
    ) -> MaybeAsync[Mapping[str, Any] | None]:
        """Look at a reply whose text is already the last message.

        Returns:
            None, or any of ``done`` (True stops, False goes on, None leaves it to
            ``check_finished``) and ``rollout_infos`` (merged, later wins).
        """
        return None

    def check_finished(
        self, request: RolloutRequest, choice: Choice, turn: int, /
    ) -> MaybeAsync[bool]:
        """Decide whether the trajectory ends, where ``on_turn_end`` did not.

        Args:
            request: The conversation, the reply included.
            choice: The reply.
            turn: From 1.
        """
        return choice.finish_reason == "length" or (
            self.max_turns is not None and turn >= self.max_turns
        )

    def step(
        self, request: RolloutRequest, choice: Choice, turn: int, /
    ) -> MaybeAsync[Mapping[str, Any]]:
        """Prepare the next turn; called only if there is one.

        Returns:
            ``infer_request``, the same or another one. ``response_token_ids`` replace this reply's
            ids, with ``response_loss_mask`` (without it, all ones) and ``rollout_logprobs`` (one
            a token with mask 1). Without ids the engine's record stands, and text added to the
            assistant's message is encoded and inserted with mask 0. ``rollout_infos`` are merged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step for a second turn")

    async def run(
        self, request: RolloutRequest, config: RolloutConfig, /
    ) -> RolloutOutput | Sequence[RolloutOutput]:
        """Run the trajectory from after its start to before its end.

        An override calls ``config.generate`` and ``config.run_turns``; the time spent in those
        does not count against the hook deadline. A list is taken as the training segments of
        one trajectory.
        """
        return await config.run_turns(request)

    def on_trajectory_end(
        self,
        output: RolloutOutput | Sequence[RolloutOutput],
        error: BaseException | None,
        /,
    ) -> MaybeAsync[None]:
        """Clean up, once, on every path: also after errors and cancellation.

        Args:
            output: What ``run`` returned; after an error, one output with what was recorded until
                then, and the ``uuid`` of the requests to tell whose it is.
            error: What ended the trajectory, None if it ended well.
        """
        return None
