# pyright: basic
"""Micro models written by transformers, and samples of random tokens with random teachers."""

import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from opdkit.actors.megatron.settings import TrainerSettings
from opdkit.protocols.config import (
    LossSection,
    OptimizerSection,
    ParallelSection,
    TrainerSection,
)
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import (
    Sample,
    ScoredSegment,
    Segment,
    SegmentRef,
    StepPlan,
    TeacherScores,
    VersionSpan,
)

VOCAB_SIZE = 93
"""No multiple of 8: the padding of the vocabulary must not show."""

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def write_model(folder: Path, *, kind: str, tied: bool, seed: int = 0, **changes: Any) -> Path:
    """Write a model of random weights in Hugging Face format."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if kind == "qwen3" else 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        **changes,
    }
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        # transformers annotates nothing here.
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](**values))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
        model.save_pretrained(folder)
    return folder


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder with transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )


def settings_for(model: Path, *, data: int = 1, tensor: int = 1, **changes: Any) -> TrainerSettings:
    """Return settings in float32 with a constant learning rate."""
    trainer_changes: dict[str, Any] = {
        name: changes.pop(name) for name in ("recompute", "optimizer") if name in changes
    }
    trainer = TrainerSection(
        parallel=ParallelSection(data=data, tensor=tensor, sequence=changes.pop("sequence", False)),
        **{"optimizer": OptimizerSection(lr=1e-3, schedule="constant"), **trainer_changes},
    )
    values: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "export_dtype": "float32",
        "export_dir": str(model.parent / "export"),
        "num_vocab": VOCAB_SIZE,
        "num_steps": 10,
        "max_sequence_tokens": 64,
        "sampling_temperature": 1.0,
        "seed": 0,
        "trainer": trainer,
        "loss": LossSection(top_k=8),
        "collective_timeout_s": 60.0,
    }
    return TrainerSettings(**{**values, **changes})


def make_sample(sample_id: str, *, lengths: tuple[int, ...], seed: int, top_k: int = 8) -> Sample:
    """Return a sample with one segment a length; about the last half of each is supervised."""
    draw = np.random.default_rng(seed)
    return Sample(
        sample_id=sample_id,
        segments=tuple(
            make_segment(draw, num_tokens=num_tokens, num_prompt=(num_tokens + 1) // 2, top_k=top_k)
            for num_tokens in lengths
        ),
    )


def make_segment(
    draw: np.random.Generator, *, num_tokens: int, num_prompt: int, top_k: int
) -> ScoredSegment:
    """Return a segment whose tokens behind the prompt are supervised; ``top_k`` 0: all ids."""
    num_supervised = num_tokens - num_prompt
    mask = np.zeros(num_tokens, np.uint8)
    mask[num_prompt:] = 1
    token_ids = draw.integers(0, VOCAB_SIZE, num_tokens)
    logits = torch.tensor(draw.normal(size=(num_supervised, VOCAB_SIZE)) * 2.0)
    full = logits.log_softmax(-1)
    logprobs, ids = full.topk(top_k) if top_k else (full, torch.empty(0, dtype=torch.int64))
    targets = torch.tensor(token_ids[num_prompt:])
    sampled = full.gather(1, targets[:, None])[:, 0]
    return ScoredSegment(
        segment=Segment(
            token_ids=token_ids.astype("<i4").tobytes(),
            loss_mask=mask.tobytes(),
            sampler_logprobs=(mask * draw.normal(size=num_tokens)).astype("<f4").tobytes(),
            spans=(VersionSpan(policy_version=PolicyVersion(0), num_tokens=num_supervised),)
            if num_supervised
            else (),
        ),
        scores=TeacherScores(
            num_positions=num_supervised,
            support_size=top_k or VOCAB_SIZE,
            token_ids=ids.numpy().astype("<i4").tobytes(),
            logprobs=logprobs.numpy().astype("<f4").tobytes(),
            sampled_logprobs=sampled.numpy().astype("<f4").tobytes(),
            tail_mass=(1.0 - logprobs.exp().sum(-1)).numpy().astype("<f4").tobytes(),
        ),
    )


def make_plan(samples: list[Sample], *, data: int = 1, per_microbatch: int = 2) -> StepPlan:
    """Deal the segments out to ranks in turn; the shorter ranks end with empty micro-batches."""
    refs = [
        SegmentRef(
            sample_id=sample.sample_id,
            index=index,
            num_tokens=scored.segment.num_tokens,
            num_supervised=scored.segment.num_supervised,
        )
        for sample in samples
        for index, scored in enumerate(sample.segments)
    ]
    ranks = [
        [
            tuple(refs[rank::data][start : start + per_microbatch])
            for start in range(0, len(refs[rank::data]), per_microbatch)
        ]
        for rank in range(data)
    ]
    num_microbatches = max(1, *(len(rank) for rank in ranks))
    return StepPlan(
        step=0,
        microbatches=tuple(tuple(rank + [()] * (num_microbatches - len(rank))) for rank in ranks),
        num_supervised=sum(ref.num_supervised for ref in refs),
        num_sequences=sum(ref.num_supervised > 0 for ref in refs),
    )


def by_id(samples: list[Sample]) -> dict[str, Sample]:
    """Return the samples as a rank holds them."""
    return {sample.sample_id: sample for sample in samples}


def without_supervision(sample: Sample) -> Sample:
    """Return the sample with nothing supervised."""
    draw = np.random.default_rng(0)
    return msgspec.structs.replace(
        sample, segments=(make_segment(draw, num_tokens=5, num_prompt=5, top_k=8),)
    )
