# pyright: basic
"""Requests to a student on the micro model, and what their replies must be."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opdkit.protocols.messages import GenerateRequest, TokenChunk, VersionSpan
from tests.actors.micro_model import logprobs_of

PROMPT = list(range(40, 60))
TOLERANCE = 1e-4
"""Nats; float32 against float32 by another order of summation."""

Floats = npt.NDArray[np.float32]


@dataclass
class Reply:
    """All chunks of a reply."""

    token_ids: list[int]
    logprobs: Floats
    spans: list[VersionSpan]
    finish_reason: str | None
    num_chunks: int


def request(
    name: str,
    *,
    prompt: list[int] = PROMPT,
    max_tokens: int = 24,
    temperature: float = 1.0,
) -> GenerateRequest:
    """Ask for a reply to some ids."""
    return GenerateRequest(
        request_id=name,
        session_id=name,
        token_ids=np.asarray(prompt, "<i4").tobytes(),
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        seed=7,
    )


async def collect(stream: AsyncGenerator[TokenChunk, None]) -> Reply:
    """Read a reply to its end."""
    async with aclosing(stream):
        chunks = [chunk async for chunk in stream]
    return Reply(
        token_ids=[i for c in chunks for i in np.frombuffer(c.token_ids, "<i4").tolist()],
        logprobs=np.concatenate([np.frombuffer(c.logprobs, "<f4") for c in chunks]),
        spans=[span for c in chunks for span in c.spans],
        finish_reason=chunks[-1].finish_reason,
        num_chunks=len(chunks),
    )


def sampled_logprobs(
    model: Any, token_ids: list[int], *, prompt: list[int] = PROMPT, temperature: float = 1.0
) -> Floats:
    """Return what transformers says of the ids of a reply, [N]."""
    rows = logprobs_of(model, prompt + token_ids, temperature=temperature)
    first = len(prompt) - 1
    picked = rows[torch.arange(first, first + len(token_ids)), torch.tensor(token_ids)]
    result: Floats = picked.numpy()
    return result
