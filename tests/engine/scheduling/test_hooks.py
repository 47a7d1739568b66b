"""A hook of any kind is awaited under its deadline, and fails by name."""

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from opdkit.engine.scheduling.contract import Scheduler
from opdkit.engine.scheduling.hooks import (
    HookRunner,
    OnTimeout,
    Pause,
    finish_despite_cancellation,
)
from opdkit.engine.testing import VirtualTimeLoop
from opdkit.protocols.errors import HookError, HookTimeout, JobFailed
from tests.conftest import Run

DEADLINE_S = 0.03
Hook = Callable[..., Any]


def make_hooks(
    hook: Hook,
    *,
    name: str = "step",
    timeout_s: float = 60.0,
    on_timeout: OnTimeout = "drop",
) -> HookRunner:
    scheduler = type("Users", (Scheduler,), {name: hook})()
    return HookRunner(scheduler, timeout_s=timeout_s, on_timeout=on_timeout, counters=Counter())


def test_an_async_hook_runs_on_the_loop_and_a_plain_one_does_not(run: Run) -> None:
    async def on_loop(self: object) -> int:
        asyncio.get_running_loop()
        return threading.get_ident()

    def in_thread(self: object) -> int:
        return threading.get_ident()

    assert run(make_hooks(on_loop).call("step")) == threading.get_ident()
    assert run(make_hooks(in_thread).call("step")) != threading.get_ident()


def test_defaults_need_no_thread(run: Run) -> None:
    hooks = HookRunner(Scheduler(), timeout_s=1, on_timeout="drop", counters=Counter())
    before = threading.active_count()
    assert run(hooks.call("on_turn_end", None, None, 1)) is None
    assert threading.active_count() == before


def test_a_plain_hook_may_return_an_awaitable(run: Run) -> None:
    async def later() -> str:
        return "late"

    assert run(make_hooks(lambda self: later()).call("step")) == "late"


def test_a_plain_hook_sees_the_context_of_its_trajectory(run: Run) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def scenario() -> object:
        name.set("s0")
        return await make_hooks(lambda self: name.get()).call("step")

    assert run(scenario()) == "s0"


async def raises_async(self: object) -> None:
    raise TimeoutError("of its own")


def raises_plain(self: object) -> None:
    raise StopIteration


async def cancels_itself(self: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("hook", [raises_async, raises_plain, cancels_itself])
def test_whatever_a_hook_raises_is_a_hook_error(run: Run, hook: Hook) -> None:
    with pytest.raises(HookError, match=r"Users\.step") as failure:
        run(make_hooks(hook).call("step"))
    assert type(failure.value) is HookError
    assert failure.value.__cause__ is not None


async def hangs(self: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("on_timeout", ["drop", "error_observation"])
def test_an_async_hook_is_cancelled_at_its_deadline(on_timeout: OnTimeout) -> None:
    hooks = make_hooks(hangs, timeout_s=60.0, on_timeout=on_timeout)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        with pytest.raises(HookTimeout, match=r"Users\.step did not return .* 60 s"):
            runner.run(hooks.call("step"))
        assert runner.get_loop().time() == pytest.approx(60.0)


def test_a_timeout_can_fail_the_job() -> None:
    hooks = make_hooks(hangs, on_timeout="fail_job")
    runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
    with runner, pytest.raises(JobFailed) as failure:
        runner.run(hooks.call("step"))
    assert isinstance(failure.value.__cause__, HookTimeout)


def test_a_plain_hook_is_abandoned_at_its_deadline(run: Run) -> None:
    release = threading.Event()
    hooks = make_hooks(lambda self: release.wait(), timeout_s=DEADLINE_S)
    with pytest.raises(HookTimeout):
        run(hooks.call("step"))
    release.set()  # its late result is dropped, whether the loop still runs or not


def test_a_cancelled_call_does_not_wait_for_its_thread(run: Run) -> None:
    release, entered = threading.Event(), threading.Event()

    def stuck(self: object) -> None:
        entered.set()
        release.wait()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(make_hooks(stuck).call("step"))
            await asyncio.to_thread(entered.wait)
            task.cancel()
        assert task.cancelled()
        assert not release.is_set()

    run(scenario())
    release.set()


def test_the_deadline_stands_still_while_paused() -> None:
    pause = Pause()

    async def works(self: object) -> str:
        for _ in range(3):
            await asyncio.sleep(0.9)
            with pause.paused():
                await asyncio.sleep(1000)
        return "done"

    async def dawdles(self: object) -> None:
        with pause.paused():
            await asyncio.sleep(1000)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        patient = make_hooks(works, timeout_s=1.0)
        assert runner.run(patient.call_pausable("step", pause)) == "done"
        with pytest.raises(HookTimeout):
            runner.run(make_hooks(dawdles, timeout_s=1.0).call_pausable("step", pause))


def test_cleanup_is_finished_before_a_cancellation_is_heard(run: Run) -> None:
    async def scenario() -> bool:
        begun, is_done = asyncio.Event(), False

        async def clean_up() -> None:
            nonlocal is_done
            begun.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            is_done = True

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(finish_despite_cancellation(clean_up(), name="clean up"))
            await begun.wait()
            task.cancel()
        assert task.cancelled()
        return is_done

    assert run(scenario())
