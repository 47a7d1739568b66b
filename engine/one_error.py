"""A task group's failure as one error, for callers that catch by class."""

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import cast

from opdkit.engine.infrastructure_budget import SampleGivenUp
from opdkit.protocols.errors import SampleError


@contextmanager
def one_error() -> Generator[None]:
    """Raise what went wrong in a task group as itself: the gravest of its errors."""
    try:
        yield
    except BaseExceptionGroup as group:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            # A group that was failing already when it was cancelled forgets the cancellation.
            raise asyncio.CancelledError from group
        gravest = min(_leaves(group), key=lambda e: isinstance(e, SampleError | SampleGivenUp))
        raise gravest from gravest.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            # isinstance cannot tell of what the group is.
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
