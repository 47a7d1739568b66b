# pyright: basic
"""The coordinator of one job: an async Ray actor that runs the engine and answers for it.

It is the version board too, which student replicas watch, and it keeps the progress feed, which
the foreground process watches. Whoever watches waits in a call of its own for something new.
"""

import asyncio
import pathlib

import msgspec
import ray

from opdkit.actors.board_access import BoardAddress, WatchedBoard
from opdkit.actors.launch import launch
from opdkit.actors.run_messages import Resumption, RunOutcome, failed
from opdkit.engine.progress_feed import ProgressFeed
from opdkit.engine.run import Run
from opdkit.engine.run_parts import RunState
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import DeadlineExceeded
from opdkit.protocols.messages import WeightManifest


class Coordinator(WatchedBoard):
    """One job, from its start to its end."""

    def __init__(self, spec: bytes, *, run_directory: str, weights_directory: str) -> None:
        """Take the job as JSON, the run's folder, and one in shared memory for the weights."""
        super().__init__()
        self._spec = msgspec.json.decode(spec, type=JobSpec)
        self._run_directory = pathlib.Path(run_directory)
        self._weights_directory = weights_directory
        self._feed = ProgressFeed()
        self._driving: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def run(self, resumption: bytes | None) -> bytes:
        """Run the job; return the msgpack ``RunOutcome``. Only one call is made."""
        outcome = RunOutcome()
        try:
            async with asyncio.TaskGroup() as group:
                self._driving = group.create_task(self._drive(resumption), name="engine")
            outcome = RunOutcome(was_stopped=self._driving.cancelled())
        except Exception as error:  # noqa: BLE001 - supervision: whoever watches is told the cause
            outcome = failed(first_cause(error))
        finally:
            self._ended.set()
            await self.close()
            await self._feed.close()
        return msgspec.msgpack.encode(outcome)

    async def stop(self) -> None:
        """End the run where it is, and return when its parts are taken down."""
        if self._driving is not None:
            if not self._driving.cancelling():  # a second one would break off the taking down
                self._driving.cancel()
            await self._ended.wait()

    async def progress(self, num_seen: int) -> bytes:
        """Wait for more progress records than seen; none: the run is over. Msgpack list."""
        return msgspec.msgpack.encode(await self._feed.after(num_seen))

    async def publish(self, manifest: WeightManifest) -> None:
        """Publish weights within the deadline, in case a replica died and nobody saw it.

        Raises:
            DeadlineExceeded: naming the replicas that have not answered.
        """
        deadline_s = self._spec.deadlines.publish_s
        try:
            async with asyncio.timeout(deadline_s):
                await super().publish(manifest)
        except TimeoutError:
            raise DeadlineExceeded(
                f"student weight sync v{manifest.policy_version}: not every replica serves it "
                f"after {deadline_s:g} s: {await self.served_versions()}"
            ) from None

    async def _drive(self, encoded: bytes | None) -> None:
        resumption = msgspec.msgpack.decode(encoded, type=Resumption) if encoded else None
        state = msgspec.msgpack.decode(resumption.state, type=RunState) if resumption else None
        context = ray.get_runtime_context()
        async with launch(
            self._spec,
            run_directory=self._run_directory,
            weights_directory=self._weights_directory,
            board=BoardAddress(
                actor_name=context.get_actor_name() or "",
                namespace=context.namespace,
                control_s=self._spec.deadlines.control_s,
            ),
            publisher=self,
            feed=self._feed,
            resumed_step=state.step if state else None,
        ) as launched:
            if resumption is not None:
                await launched.trainer.load(resumption.trainer_path)
            await Run(self._spec, launched.parts, state=state).run()
            await launched.trainer.save_hf(str(self._run_directory / "export"))


def first_cause(error: BaseException) -> BaseException:
    """Return what made a group of tasks fail: the first error that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
