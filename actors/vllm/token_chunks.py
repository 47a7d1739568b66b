# pyright: basic
"""Between our messages and vLLM's: sampling parameters in, chunks of tokens out."""

from collections.abc import Sequence

import numpy as np
from vllm import CompletionOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from opdkit.protocols.errors import GenerationError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import GenerateRequest, TokenChunk, VersionSpan

STREAM_INTERVAL_TOKENS = 16
"""Tokens between two chunks of one reply, after the first token: each chunk costs one message."""

VersionStarts = Sequence[tuple[str, int]]
"""(weight version, index of the first token of the reply that came from it), in order."""


def ids_from_bytes(data: bytes) -> list[int]:
    """Return int32 ids as the list that vLLM wants."""
    return np.frombuffer(data, "<i4").tolist()


def sampling_params(request: GenerateRequest, *, max_tokens: int) -> SamplingParams:
    """Ask for ids with the log-probability of each sampled token, as they come, and no text."""
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        max_tokens=max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=STREAM_INTERVAL_TOKENS,
    )


def token_chunk(completion: CompletionOutput, *, first: int, starts: VersionStarts) -> TokenChunk:
    """Pack what one output of the engine adds to a reply.

    Args:
        completion: the new tokens and their log-probabilities.
        first: place of the first of them in the reply.
        starts: where the versions of the reply begin.

    Raises:
        GenerationError: the engine gave other than one log-probability a token.
    """
    token_ids = np.asarray(completion.token_ids, "<i4")
    logprobs = np.asarray(completion.logprobs.logprobs if completion.logprobs else (), "<f4")
    if len(logprobs) != len(token_ids):
        raise GenerationError(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
    return TokenChunk(
        token_ids=token_ids.tobytes(),
        logprobs=logprobs.tobytes(),
        spans=spans_between(starts, first, first + len(token_ids)),
        finish_reason=completion.finish_reason,
    )


def spans_between(starts: VersionStarts, first: int, end: int) -> tuple[VersionSpan, ...]:
    """Cut the versions of a reply down to its tokens ``first`` … ``end - 1``."""
    spans: list[VersionSpan] = []
    for index, (version, start) in enumerate(starts):
        next_start = starts[index + 1][1] if index + 1 < len(starts) else end
        num_tokens = min(next_start, end) - max(start, first)
        if num_tokens > 0:
            spans.append(
                VersionSpan(policy_version=PolicyVersion(int(version)), num_tokens=num_tokens)
            )
    return tuple(spans)
