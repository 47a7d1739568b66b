"""The scripted parts keep the promises of the real ones."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from opdkit.engine.testing import (
    LetterTemplate,
    ScriptedReply,
    ScriptedStudent,
    VirtualTimeLoop,
    parse_reply,
)
from opdkit.engine.testing.letter_template import END
from opdkit.protocols.messages import GenerateRequest
from tests.conftest import Run


def make_request(*, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        session_id="s",
        token_ids=b"",
        max_tokens=max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        seed=None,
    )


def test_the_notation_of_the_cases_is_read() -> None:
    cut = ScriptedReply(text="x", token_ids=(1, 2), finish_reason="length")
    assert parse_reply("x:[1,2]/len") == cut
    assert parse_reply(":[]") == ScriptedReply()
    with pytest.raises(ValueError, match="not of the form"):
        parse_reply("x")


@pytest.mark.parametrize("text", ["", "hello, world", "<think>"])
def test_letters_decode_to_what_was_encoded(text: str) -> None:
    template = LetterTemplate({(1, 2): "x"})
    assert template.decode([*template.encode(text), 1, 2, END]) == text + "x"


def test_a_scripted_reply_is_cut_at_max_tokens(run: Run) -> None:
    async def scenario() -> list[str | None]:
        student = ScriptedStudent([parse_reply("x:[1,2,3]")])
        return [c.finish_reason async for c in student.generate(make_request(max_tokens=2))]

    assert run(scenario()) == [None, "length"]


def test_a_closed_stream_is_not_open(run: Run) -> None:
    async def scenario() -> int:
        student = ScriptedStudent([parse_reply("x:[1,2,3]")])
        async with aclosing(student.generate(make_request())) as chunks:  # type: ignore[type-var]
            await anext(chunks)
            assert student.num_open == 1
        return student.num_open

    assert run(scenario()) == 0


def test_virtual_time_passes_without_waiting() -> None:
    async def scenario() -> float:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(3600))
            tasks.create_task(asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    started_s = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(scenario()) == pytest.approx(7200)
    assert time.monotonic() - started_s < 60


def test_virtual_time_waits_for_a_thread_if_for_nothing_else() -> None:
    async def scenario() -> float:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=lambda: loop.call_soon_threadsafe(woken.set)).start()
        await woken.wait()
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(scenario()) == 0


def test_executor_work_raises_in_who_awaits_it() -> None:
    def fail() -> None:
        raise KeyError

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(KeyError):
        runner.run(asyncio.to_thread(fail))
