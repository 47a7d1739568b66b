"""The student's vocabulary, split over the ranks of a tensor-parallel group.

Every rank holds the same number of columns of the logits, rank by rank. Only sums and maxima of
one number a position cross the group. Suffixes: P positions, C positions of one chunk, V columns
of this rank, K the teacher's tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opdkit.protocols.errors import GenerationError

CHUNK_CELLS = 1 << 20
"""Logits worked on at once: 4 MiB in float32, and a handful of such blocks, near a core's cache."""


class VocabularyShard(NamedTuple):
    """The columns of one rank."""

    group: dist.ProcessGroup | None
    first_id: int
    """Token id of column 0."""
    num_columns: int
    """Columns that stand for a token; those behind them are padding."""


def shard_of(
    logits_PV: Tensor, *, num_vocab: int, group: dist.ProcessGroup | None
) -> VocabularyShard:
    """Return this rank's share of a vocabulary of ``num_vocab`` ids."""
    width = logits_PV.shape[1]
    first_id = 0 if group is None else group.rank() * width
    return VocabularyShard(group, first_id, max(0, min(width, num_vocab - first_id)))


def row_chunks(logits_PV: Tensor, chunk_cells: int) -> Iterator[slice]:
    """Cut the positions so that a chunk has at most ``chunk_cells`` logits, or one position."""
    num_rows = max(1, chunk_cells // max(1, logits_PV.shape[1]))
    for start in range(0, logits_PV.shape[0], num_rows):
        yield slice(start, start + num_rows)


def working_dtype(logits_PV: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 logits."""
    return torch.promote_types(logits_PV.dtype, torch.float32)


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add up ``values`` over the group, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=group)
    return values


def max_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the maximum of ``values`` over the group, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


class LogSums(NamedTuple):
    """log Σ exp of one or several blocks of columns, as the sum of two terms.

    They stay apart because float32 numbers near 1e4 lie 1e-3 apart: subtract ``top`` first,
    then ``log_sum``.
    """

    top: Tensor
    """[blocks, C], -inf where a block has no finite column on any rank."""
    log_sum: Tensor
    """[blocks, C], in [0, log columns], or -inf."""


def log_sum_exp(blocks: Sequence[Tensor], group: dist.ProcessGroup | None) -> LogSums:
    """Sum the exponentials of each block's rows over all columns of all ranks."""
    top = max_over_ranks(torch.stack([_row_max(block) for block in blocks]), group)
    origin = top.masked_fill(top == -math.inf, 0.0)
    totals = [
        (block - row_origin[:, None]).exp_().sum(-1)
        for block, row_origin in zip(blocks, origin, strict=True)
    ]
    return LogSums(top, sum_over_ranks(torch.stack(totals), group).log_())


def _row_max(block: Tensor) -> Tensor:
    return block.amax(-1) if block.shape[-1] else block.new_full(block.shape[:-1], -math.inf)


def token_logprobs(
    logits_PV: Tensor,
    token_ids_P: Tensor,
    *,
    num_vocab: int,
    group: dist.ProcessGroup | None = None,
    chunk_cells: int = CHUNK_CELLS,
) -> Tensor:
    """Return the log-probability, in nats at temperature 1, of one token at each position.

    Args:
        logits_PV: this rank's columns; not differentiated.
        token_ids_P: the same on every rank.
        num_vocab: number of real ids; columns from there on are padding.
        group: the tensor-parallel group; None: this rank holds the whole vocabulary.
        chunk_cells: logits worked on at once.

    Raises:
        GenerationError: an id outside [0, num_vocab).
    """
    outside = (token_ids_P < 0) | (token_ids_P >= num_vocab)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise GenerationError(
            f"token id {int(token_ids_P[position])} at supervised position {position}, "
            f"but the student's vocabulary has ids 0 to {num_vocab - 1}"
        )
    shard = shard_of(logits_PV, num_vocab=num_vocab, group=group)
    dtype = working_dtype(logits_PV)
    logprobs_P = logits_PV.new_empty(logits_PV.shape[0], dtype=dtype)
    for rows in row_chunks(logits_PV, chunk_cells):
        logits_CV = logits_PV.detach()[rows, : shard.num_columns].to(dtype)
        logprobs_P[rows] = _chunk_logprobs(logits_CV, token_ids_P[rows], shard)
    return logprobs_P


def _chunk_logprobs(logits_CV: Tensor, token_ids_C: Tensor, shard: VocabularyShard) -> Tensor:
    normaliser = log_sum_exp((logits_CV,), shard.group)
    column_C = token_ids_C.long() - shard.first_id
    is_here = (column_C >= 0) & (column_C < shard.num_columns)
    row = is_here.nonzero()[:, 0]
    relative_C = torch.zeros_like(normaliser.top[0])
    relative_C[row] = logits_CV[row, column_C[row]] - normaliser.top[0, row]
    return sum_over_ranks(relative_C, shard.group) - normaliser.log_sum[0]
