# pyright: basic
"""The student as Megatron-Core trains it: model, gradient buffers, optimizer and schedule."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from opdkit.actors.megatron.architecture import Architecture, check_parallel, read_architecture
from opdkit.actors.megatron.batches import MicroBatch
from opdkit.actors.megatron.conversion import load_weights
from opdkit.actors.megatron.layers import layer_spec
from opdkit.actors.megatron.settings import TrainerSettings
from opdkit.actors.megatron.tensor_files import FolderTensors
from opdkit.actors.megatron.transformer import transformer_config
from opdkit.protocols.config import OptimizerSection
from opdkit.protocols.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student:
    """What one rank trains. Everything in it is changed in place by a step."""

    settings: TrainerSettings
    architecture: Architecture
    model: Any
    """``DistributedDataParallel`` around ``StudentModel``."""
    optimizer: Any
    schedule: Any


class StudentModel(GPTModel):  # type: ignore[misc]  # untyped base
    """Megatron's GPT, whose output layer sees only the positions that the loss asks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.sequence_parallel:
            # forward() gathers the sequence before it selects rows, so the layer must not.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the logits [P, V / TP] of the batch's ``rows_P``."""
        packed = batch.packed_sequences()
        hidden_T1H = self.decoder(
            hidden_states=self.embedding(
                input_ids=batch.tokens_T[None], position_ids=batch.positions_T[None]
            ),
            attention_mask=None,
            rotary_pos_emb=self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True),
            packed_seq_params=packed,
        )
        if self.config.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=False
            )
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        logits_P1V: Tensor
        logits_P1V, _ = self.output_layer(hidden_T1H[batch.rows_P], weight=weight)
        return logits_P1V[:, 0]


def build_student(settings: TrainerSettings) -> Student:
    """Build this rank's part of the student and read its weights.

    Raises:
        ConfigError: the model folder, or how it is to be split, is not supported.
    """
    parallel = settings.trainer.parallel
    architecture = read_architecture(settings.model)
    check_parallel(architecture, parallel)
    if settings.num_vocab > architecture.vocab_size:
        raise ConfigError(
            f"num_vocab is {settings.num_vocab}, but the student has "
            f"{architecture.vocab_size} logits only"
        )
    config = transformer_config(
        architecture,
        parallel,
        dtype=DTYPES[settings.dtype],
        recompute=settings.trainer.recompute,
    )
    config.finalize_model_grads_func = _sum_gradients
    bare = StudentModel(
        config,
        layer_spec(config),
        vocab_size=architecture.padded_vocab_size(parallel.tensor),
        max_sequence_length=settings.max_sequence_tokens,
        position_embedding_type="rope",
        rotary_base=architecture.rope_base,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 1.0,
        share_embeddings_and_output_weights=architecture.tied,
    )
    with FolderTensors(settings.model) as tensors:
        load_weights(bare, tensors, architecture)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), bare
    )
    optimizer = _build_optimizer(settings, model)
    return Student(
        settings=settings,
        architecture=architecture,
        model=model,
        optimizer=optimizer,
        schedule=_build_schedule(settings, optimizer),
    )


def _sum_gradients(models: list[Any], num_tokens: object, **options: Any) -> None:
    """Sum over ranks, and divide by nothing: the weights of the loss hold the denominator."""
    finalize_model_grads(models, None, **options)


def _build_optimizer(settings: TrainerSettings, model: Any) -> Any:
    section = settings.trainer.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.beta1,
            adam_beta2=section.beta2,
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=settings.dtype == "bfloat16",
            params_dtype=DTYPES[settings.dtype],
        ),
        [model],
        use_gloo_process_groups=False,
    )
    if isinstance(optimizer.optimizer, torch.optim.AdamW):
        for group in optimizer.optimizer.param_groups:
            group["fused"] = True
    return optimizer


def _build_schedule(settings: TrainerSettings, optimizer: Any) -> Any:
    section: OptimizerSection = settings.trainer.optimizer
    if section.warmup_steps >= settings.num_steps:
        raise ConfigError(
            f"trainer.optimizer.warmup_steps is {section.warmup_steps}, but must be less than "
            f"pipeline.num_steps, {settings.num_steps}"
        )
    return OptimizerParamScheduler(
        optimizer,
        # The first step already moves: its rate is one part of warmup_steps + 1.
        init_lr=section.lr / (section.warmup_steps + 1),
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=settings.num_steps,
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=settings.num_steps,
        wd_incr_style="constant",
        # A resumed run may be longer than the one that was saved.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


@contextlib.contextmanager
def evaluating(student: Student) -> Iterator[None]:
    """Keep the model from recording what a backward pass would need."""
    student.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        student.model.train()
