"""What follows a recorded reply is found without touching the recorded ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from opdkit.engine.history import History, TurnPlan, plan_turn
from opdkit.engine.testing.letter_template import END, ROLES, LetterTemplate
from opdkit.protocols.roles import ChatTemplate

QUESTION = {"role": "user", "content": "q"}
USER, ASSISTANT = ROLES["user"], ROLES["assistant"]
REPLY: dict[tuple[int, ...], str] = {(1, 2): "x"}


def said(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def letters(text: str) -> list[int]:
    return LetterTemplate().encode(text)


def plan(
    messages: Sequence[Mapping[str, Any]],
    *,
    reply: str = "x",
    reply_ids: Sequence[int] = (1, 2),
    template: ChatTemplate | None = None,
) -> TurnPlan:
    """Plan the turn after a question and one reply."""
    template = template or LetterTemplate(REPLY)
    prompt = template.render([QUESTION])
    return plan_turn(
        template,
        messages,
        tools=(),
        recorded=[*prompt, *reply_ids],
        history=History(rendered=prompt, num_messages=1, reply_text=reply),
    )


def test_the_first_turn_sends_the_rendered_prompt() -> None:
    template = LetterTemplate()
    planned = plan_turn(template, [QUESTION], tools=(), recorded=(), history=None)
    assert planned.prompt == template.render([QUESTION])


def test_a_prefilled_first_reply_follows_the_prompt() -> None:
    template = LetterTemplate()
    messages = [QUESTION, said("So")]
    planned = plan_turn(template, messages, tools=(), recorded=(), history=None)
    assert planned.prompt == template.render([QUESTION]) + letters("So")


def test_new_messages_add_the_reply_s_end_and_themselves() -> None:
    planned = plan([QUESTION, said("x"), {"role": "user", "content": "z"}])
    assert planned.prompt is None
    assert planned.insertion == [END, USER, *letters("z"), END, ASSISTANT]
    assert not planned.in_turn


def test_an_end_that_was_sampled_is_not_added_again() -> None:
    messages = [QUESTION, said("x"), {"role": "user", "content": "z"}]
    planned = plan(messages, reply_ids=(1, 2, END))
    assert planned.prompt is None
    assert planned.insertion == [USER, *letters("z"), END, ASSISTANT]


def test_an_end_that_the_template_does_not_use_starts_a_new_sequence() -> None:
    messages = [QUESTION, said("x"), {"role": "user", "content": "z"}]
    planned = plan(messages, reply_ids=(1, 2, ROLES["tool"]))
    assert planned.prompt == LetterTemplate(REPLY).render(messages)


@pytest.mark.parametrize("text", ["x.", "x!", ".", "x\n", " x ", "", "xx"])
def test_any_text_of_the_reply_is_found_in_the_rendering(text: str) -> None:
    messages = [QUESTION, said(text), {"role": "user", "content": text}]
    planned = plan(messages, reply=text, reply_ids=(1, 2), template=LetterTemplate({(1, 2): text}))
    assert planned.insertion == [END, USER, *letters(text), END, ASSISTANT]


def test_text_added_to_the_reply_is_encoded_alone() -> None:
    planned = plan([QUESTION, said("x OBS")])
    assert planned.prompt is None
    assert planned.insertion == letters(" OBS")
    assert planned.in_turn


def test_going_on_after_the_end_starts_a_sequence_without_it() -> None:
    planned = plan([QUESTION, said("x OBS")], reply_ids=(1, 2, END))
    assert planned.prompt == [*LetterTemplate().render([QUESTION]), 1, 2, *letters(" OBS")]
    assert not planned.in_turn


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "summary"}],
        [{"role": "user", "content": "Q"}, said("x"), {"role": "user", "content": "z"}],
        [QUESTION, said("edited"), {"role": "user", "content": "z"}],
        [QUESTION, {"role": "user", "content": "z"}],
        [QUESTION, said("edited")],
    ],
    ids=["compressed", "other prompt", "edited reply", "no reply", "edited, to go on"],
)
def test_a_history_that_was_rewritten_starts_a_new_sequence(
    messages: list[dict[str, Any]],
) -> None:
    planned = plan(messages)
    template = LetterTemplate()
    is_open = messages[-1]["role"] == "assistant"
    expected = template.render(messages[:-1]) + letters("edited") if is_open else None
    assert planned.prompt == (expected or template.render(messages))


def test_a_template_that_strips_thinking_starts_a_new_sequence() -> None:
    template = LetterTemplate({(1, 2): "<think>m</think>x"}, strips_thinking=True)
    messages = [QUESTION, said("<think>m</think>x"), {"role": "user", "content": "z"}]
    planned = plan(messages, reply="<think>m</think>x", template=template)
    assert planned.prompt == template.render(messages)
    assert letters("m")[0] not in template.render(messages)


def test_thinking_is_kept_until_the_user_speaks() -> None:
    template = LetterTemplate({(1, 2): "<think>m</think>x"}, strips_thinking=True)
    messages = [QUESTION, said("<think>m</think>x"), {"role": "tool", "content": "z"}]
    planned = plan(messages, reply="<think>m</think>x", template=template)
    assert planned.insertion == [END, ROLES["tool"], *letters("z"), END, ASSISTANT]


class Trimming(LetterTemplate):
    """Strips the white space around every message, as Llama's templates do."""

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Strip, then render."""
        stripped = [{**message, "content": str(message["content"]).strip()} for message in messages]
        return super().render(stripped, tools=tools)


@pytest.mark.parametrize("text", [" x\n", " x.\n"])
def test_white_space_that_the_template_strips_stays_in_the_record(text: str) -> None:
    messages = [QUESTION, said(text), {"role": "user", "content": "z"}]
    planned = plan(messages, reply=text, template=Trimming({(1, 2): text}))
    assert planned.prompt is None
    assert planned.insertion == [END, USER, *letters("z"), END, ASSISTANT]


MERGED = 777


class Merging(LetterTemplate):
    """Has an id for a space at the beginning of the assistant's message, as merges make them."""

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Render, then merge."""
        merged: list[int] = []
        for token_id in super().render(messages, tools=tools):
            if merged[-1:] == [ASSISTANT] and [token_id] == letters(" "):
                merged[-1] = MERGED
            else:
                merged.append(token_id)
        return merged


def test_a_merge_over_the_beginning_of_the_reply_is_no_rewrite() -> None:
    messages = [QUESTION, said(" x"), {"role": "user", "content": "z"}]
    template = Merging({(1, 2): " x", (MERGED,): " "})
    assert MERGED in template.render(messages)
    planned = plan(messages, reply=" x", template=template)
    assert planned.prompt is None
    assert planned.insertion == [END, USER, *letters("z"), END, ASSISTANT]
