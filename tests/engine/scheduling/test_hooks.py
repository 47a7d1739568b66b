"""A hook of any kind is awaited under its deadline, and fails by name."""

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
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

    def promises(self: object) -> Awaitable[str]:
        return later()

    assert run(make_hooks(promises).call("step")) == "late"


def test_a_plain_hook_sees_the_context_of_its_trajectory(run: Run) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    def reads(self: object) -> str:
        return name.get()

    async def scenario() -> object:
        name.set("s0")
        return await make_hooks(reads).call("step")

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

    def stuck(self: object) -> None:
        release.wait()

    hooks = make_hooks(stuck, timeout_s=DEADLINE_S)
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


def test_the_deadline_of_run_stands_still_while_paused() -> None:
    pause = Pause()

    async def works(self: object, *_: object) -> str:
        for _turn in range(3):
            await asyncio.sleep(0.9)
            with pause.paused():
                await asyncio.sleep(1000)
        return "done"

    async def dawdles(self: object, *_: object) -> None:
        with pause.paused():
            await asyncio.sleep(1000)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        patient = make_hooks(works, name="run", timeout_s=1.0)
        assert runner.run(patient.call_run(pause)) == "done"
        with pytest.raises(HookTimeout):
            runner.run(make_hooks(dawdles, name="run", timeout_s=1.0).call_run(pause))


async def fails_in_a_task_group(self: object) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raises_async(None))


def test_a_failed_task_group_of_a_hook_does_not_mark_the_trajectory(run: Run) -> None:
    async def scenario() -> int:
        with pytest.raises(HookError):
            await make_hooks(fails_in_a_task_group).call("step")
        current = asyncio.current_task()
        assert current is not None
        return current.cancelling()

    assert run(scenario()) == 0


async def swallows(self: object) -> str:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "as if nothing had happened"
    return ""


async def disguises(self: object) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("tool failed") from None


@pytest.mark.parametrize("hook", [swallows, disguises])
def test_a_hook_cannot_hide_its_deadline(hook: Hook) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(HookTimeout):
        runner.run(make_hooks(hook).call("step"))


@pytest.mark.parametrize("hook", [hangs, swallows, disguises])
def test_a_hook_cannot_hide_the_cancellation_of_its_trajectory(run: Run, hook: Hook) -> None:
    async def scenario() -> bool:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(make_hooks(hook).call("step"))
            await asyncio.sleep(0.001)
            task.cancel()
        return task.cancelled()

    assert run(scenario())


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
