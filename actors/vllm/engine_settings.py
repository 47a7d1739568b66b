# pyright: basic
"""From our configuration to vLLM's: arguments of an engine and environment of its process."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from opdkit.actors.hardware import resolve_dtype
from opdkit.protocols.config import EngineSection, LossSection

BYTES_PER_MIB = 1 << 20
WORKER_EXTENSION = "opdkit.actors.vllm.worker.WorkerExtension"
FULL_VOCABULARY = -1
"""vLLM's word for as many log-probabilities as there are tokens."""


def student_arguments(section: EngineSection, *, seed: int) -> AsyncEngineArgs:
    """Return the arguments of an engine that samples.

    Its log-probabilities are those of the distribution sampled from, after temperature and
    truncation; vLLM's default is before (the sampler's ratio to the trainer would be off by the
    temperature).
    """
    return _arguments(
        section,
        seed=seed,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        enable_prefix_caching=True,
    )


def teacher_arguments(section: EngineSection, *, loss: LossSection) -> AsyncEngineArgs:
    """Return the arguments of an engine that scores; it may return what the loss needs.

    Without a prefix cache: vLLM computes scored prompts in full, so blocks would only be hashed.
    """
    return _arguments(
        section,
        seed=0,
        logprobs_mode="raw_logprobs",
        max_logprobs=num_prompt_logprobs(loss),
        enable_prefix_caching=False,
    )


def num_prompt_logprobs(loss: LossSection) -> int:
    """Return k, or ``FULL_VOCABULARY``."""
    return loss.top_k if loss.support == "top_k" else FULL_VOCABULARY


def _arguments(section: EngineSection, **extra: Any) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=section.model,
        # Ids go in and ids come out; the model's own end-of-sequence ids still stop it.
        skip_tokenizer_init=True,
        dtype=resolve_dtype(section.dtype),
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_batch_tokens,
        # Always explicit: the default takes nine tenths of the machine's memory, or fails.
        kv_cache_memory_bytes=section.kv_cache_mib * BYTES_PER_MIB,
        enforce_eager=section.enforce_eager,
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
        **extra,
    )
