# pyright: basic
"""Starting a vLLM engine, and its errors in our words."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMServerError
from vllm.v1.engine.async_llm import AsyncLLM

from opdkit.protocols.errors import PromptError, ReplicaLost


async def start_engine(arguments: Callable[[], AsyncEngineArgs]) -> AsyncLLM:
    """Start an engine's process and load its model; seconds, on a thread of their own.

    Args:
        arguments: called on that thread, since it reads the model's files.
    """
    engine = await asyncio.to_thread(lambda: AsyncLLM.from_engine_args(arguments()))
    # Cached by the engine. From now on a request is registered without suspension, so that what
    # is decided at its admission (the version of its cache salt) holds.
    await engine.get_supported_tasks()
    return engine


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Translate the engine's exceptions.

    Raises:
        PromptError: the engine does not accept the request.
        ReplicaLost: the engine's process died, or could not do this.
    """
    try:
        yield
    except VLLMClientError as error:
        raise PromptError(f"{what}: {error}") from error
    except VLLMServerError as error:
        raise ReplicaLost(f"{what}: the engine failed: {error}") from error
