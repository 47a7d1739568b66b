# pyright: basic
"""Starting a vLLM engine, and its errors in our words."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
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


def stop_engine(engine: AsyncLLM) -> None:
    """End an engine's process at once, and close the sockets to it; on its event loop."""
    engine.shutdown(timeout=0)
    engine.engine_core.resources.ctx.destroy(linger=0)


def prompt_ids(engine: AsyncLLM, data: bytes) -> list[int]:
    """Return int32 ids as the list that vLLM wants, checked.

    Raises:
        PromptError: an id that the model does not have. Without a tokenizer vLLM does not check,
            and such an id ends the engine, and with it every request that it holds.
    """
    token_ids = np.frombuffer(data, "<i4")
    vocab_size = engine.model_config.get_vocab_size()
    wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(wrong):
        raise PromptError(
            f"id {token_ids[wrong[0]]} at position {wrong[0]} is outside the model's vocabulary, "
            f"0 … {vocab_size - 1}"
        )
    result: list[int] = token_ids.tolist()
    return result


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
