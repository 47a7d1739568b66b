"""The messages of a trajectory, in place: text for people and templates, never for training."""

from opdkit.engine.scheduling.contract import ChatMessage
from opdkit.protocols.errors import HookError


def drop_dummies(messages: list[ChatMessage]) -> None:
    """Remove assistant messages at the end that only ask for a continuation.

    Raises:
        HookError: what a hook made of the messages is no conversation.
    """
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise HookError(f"a message has no role that is a text: {message!r}")
    while messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
        if messages[-1].get("tool_calls"):
            break
        messages.pop()
    if not messages:
        raise HookError("the request has no messages to continue")
    if messages[-1]["role"] == "assistant" and not isinstance(messages[-1].get("content"), str):
        raise HookError(f"only a text can be continued, not {messages[-1].get('content')!r}")


def add_text(messages: list[ChatMessage], text: str) -> None:
    """Append a reply, or continue the assistant's message that stands last."""
    if messages[-1]["role"] == "assistant":
        messages[-1]["content"] += text
    else:
        messages.append({"role": "assistant", "content": text})
