# pyright: basic
"""A dense float64 trainer in a few lines: transformers' model, one sequence at a time, AdamW."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdkit.protocols.config import LossSection, OptimizerSection
from opdkit.protocols.messages import Sample, ScoredSegment
from tests.actors.megatron.micro import load_model


class DenseTrainer:
    """Trains on all samples of a step at once."""

    def __init__(self, model: Path, loss: LossSection, optimizer: OptimizerSection) -> None:
        self.model = load_model(model, torch.float64)
        self._loss, self._section = loss, optimizer
        parameters: list[Tensor] = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for one in parameters if one.ndim > 1]},
            {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def step(self, samples: list[Sample]) -> tuple[float, float]:
        """Return loss and norm of the gradient; the model keeps the gradient, clipped."""
        self._optimizer.zero_grad()
        per_segment = [
            self._position_losses(scored) for sample in samples for scored in sample.segments
        ]
        counted = [losses for losses in per_segment if len(losses)]
        if self._loss.normalize == "token":
            loss = torch.cat(counted).mean()
        else:
            loss = torch.stack([losses.mean() for losses in counted]).mean()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._section.clip_grad)
        self._optimizer.step()
        return float(loss.detach()), float(norm)

    def diagnostics(
        self, samples: list[Sample], *, sampling_temperature: float
    ) -> tuple[float, float, float]:
        """Return means of log Q - log P, of |log Q - sampler's|, and of Q on the support."""
        ratios, gaps, masses = [], [], []
        for scored in (scored for sample in samples for scored in sample.segments):
            ids = torch.tensor(np.frombuffer(scored.segment.token_ids, "<i4").astype(np.int64))
            mask = torch.tensor(np.frombuffer(scored.segment.loss_mask, np.uint8).astype(bool))
            with torch.no_grad():
                logits = self.model(ids[None]).logits[0, :-1][mask[1:]]
            targets = ids[mask][:, None]
            log_q = logits.log_softmax(-1).gather(1, targets)[:, 0]
            at_sampling = (logits / sampling_temperature).log_softmax(-1).gather(1, targets)[:, 0]
            sampled = torch.tensor(np.frombuffer(scored.segment.sampler_logprobs, "<f4").copy())
            log_p = torch.tensor(np.frombuffer(scored.scores.sampled_logprobs, "<f4").copy())
            support = torch.tensor(np.frombuffer(scored.scores.token_ids, "<i4").astype(np.int64))
            support = support.reshape(len(targets), -1)
            ratios.append(log_q - log_p)
            gaps.append((at_sampling - sampled[mask]).abs())
            masses.append(logits.softmax(-1).gather(1, support).sum(-1))
        ratio, gap, mass = (float(torch.cat(one).mean()) for one in (ratios, gaps, masses))
        return ratio, gap, mass

    def _position_losses(self, scored: ScoredSegment) -> Tensor:
        ids = torch.tensor(np.frombuffer(scored.segment.token_ids, "<i4").astype(np.int64))
        mask = torch.tensor(np.frombuffer(scored.segment.loss_mask, np.uint8).astype(bool))
        logits = self.model(ids[None]).logits[0, :-1][mask[1:]] / self._loss.temperature
        log_q = logits.log_softmax(-1)
        scores = scored.scores
        log_p = torch.tensor(np.frombuffer(scores.logprobs, "<f4").astype(np.float64))
        log_p = log_p.reshape(scores.num_positions, scores.support_size)
        if scores.token_ids:
            support = torch.tensor(np.frombuffer(scores.token_ids, "<i4").astype(np.int64))
            log_q = _with_tail(log_q.gather(1, support.reshape(log_p.shape)))
            log_p = _with_tail(log_p)
        else:
            log_p = (log_p / self._loss.temperature).log_softmax(-1)
        return self._divergence(log_p, log_q)

    def _divergence(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        if self._loss.divergence == "forward_kl":
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        if self._loss.divergence == "reverse_kl":
            return (log_q.exp() * (log_q - log_p)).sum(-1)
        beta = self._loss.beta
        assert beta is not None
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        forward = (log_p.exp() * (log_p - log_m)).sum(-1)
        return beta * forward + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    return torch.cat((logprobs, torch.log1p(-logprobs.exp().sum(-1, keepdim=True))), dim=-1)


def named(model: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return parameters, or their gradients, by name."""
    return {
        name: (parameter.grad if gradients else parameter.detach())
        for name, parameter in model.named_parameters()
    }
