# pyright: basic
"""The student's weights under Hugging Face's names, gathered on rank 0 one matrix at a time."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from opdkit.actors.megatron.conversion import split, unshard
from opdkit.actors.megatron.model import DTYPES, Student
from opdkit.actors.megatron.parallel import tensor_group
from opdkit.actors.megatron.tensor_files import TensorShape, write_tensors
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import WeightManifest

NUM_KEPT = 2
"""Versions that stay readable: the newest, and the one that replicas may still be reading."""

EXPORT_NAME = re.compile(r"policy-\d{8,}\.safetensors")

CARRIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Of the files beside the weights in a model folder: tokenizer, templates, generation defaults."""
NOT_CARRIED = ("model.safetensors.index.json", "manifest.json")
"""What describes the source folder's own files."""


def export_weights(student: Student, policy_version: PolicyVersion) -> WeightManifest | None:
    """Write the weights for the student's engines; every rank calls, rank 0 has the manifest."""
    folder = Path(student.settings.export_dir)
    path = folder / f"policy-{policy_version:08d}.safetensors"
    dtype = DTYPES[student.settings.export_dtype]
    if dist.get_rank() != 0:
        _join_gathering(student, dtype)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    written = write_tensors(path, hf_shapes(student, dtype), stream_hf(student, dtype))
    _drop_old_versions(folder)
    return WeightManifest(
        policy_version=policy_version,
        location=str(path),
        num_bytes=written.num_bytes,
        checksum=written.checksum,
    )


def save_hf(student: Student, folder: str) -> None:
    """Write a model folder that transformers and vLLM load; every rank calls."""
    dtype = DTYPES[student.settings.export_dtype]
    if dist.get_rank() != 0:
        _join_gathering(student, dtype)
        return
    source, target = Path(student.settings.model), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(
        target / "model.safetensors", hf_shapes(student, dtype), stream_hf(student, dtype)
    )
    for file in source.iterdir():
        if file.suffix in CARRIED_SUFFIXES and file.name not in NOT_CARRIED:
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_bytes())
    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[dtype_key] = student.settings.export_dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def stream_hf(student: Student, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) on rank 0; the ranks of its tensor-parallel group iterate along.

    Other data-parallel replicas hold the same weights and take no part.
    """
    group = tensor_group()
    if parallel_state.get_data_parallel_rank() != 0:
        return
    for name, parameter in _parameters(student):
        mine = parameter.detach().to(dtype)
        shards = [mine]
        if group.size() > 1:
            shards = [
                torch.empty_like(mine) for _ in range(group.size() if not group.rank() else 0)
            ]
            dist.gather(mine.contiguous(), shards or None, dst=0, group=group)
        if group.rank() == 0:
            yield from split(name, unshard(name, shards), student.architecture)


def hf_shapes(student: Student, dtype: torch.dtype) -> list[TensorShape]:
    """Return what ``stream_hf`` will yield, in its order."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    shapes: list[TensorShape] = []
    for name, parameter in _parameters(student):
        shards = [torch.empty(parameter.shape, dtype=dtype, device="meta")] * size
        parts = split(name, unshard(name, shards), student.architecture)
        shapes.extend(
            TensorShape(name=hf_name, dtype=dtype, shape=tuple(part.shape))
            for hf_name, part in parts
        )
    return shapes


def _parameters(student: Student) -> Iterator[tuple[str, Any]]:
    return iter(student.model.module.named_parameters())


def _join_gathering(student: Student, dtype: torch.dtype) -> None:
    for _ in stream_hf(student, dtype):
        raise AssertionError("weights are gathered on rank 0 only")


def _drop_old_versions(folder: Path) -> None:
    exports = [path for path in folder.iterdir() if EXPORT_NAME.fullmatch(path.name)]
    exports.sort(key=os.path.getmtime)
    for path in exports[:-NUM_KEPT]:
        path.unlink()
