# pyright: basic
"""Between our messages and vLLM's: sampling parameters in, chunks of tokens out."""

import numpy as np
from vllm import CompletionOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from opdkit.actors.vllm.version_spans import VersionStarts, spans_between
from opdkit.protocols.errors import GenerationError
from opdkit.protocols.messages import GenerateRequest, TokenChunk

STREAM_INTERVAL_TOKENS = 16
"""Tokens between two chunks of one reply, after the first token: each chunk costs one message."""


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
    flat = completion.logprobs
    logprobs = np.asarray(flat.logprobs if isinstance(flat, FlatLogprobs) else (), "<f4")
    if len(logprobs) != len(token_ids):
        raise GenerationError(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
    return TokenChunk(
        token_ids=token_ids.tobytes(),
        logprobs=logprobs.tobytes(),
        spans=spans_between(starts, first, first + len(token_ids)),
        finish_reason=completion.finish_reason,
    )
