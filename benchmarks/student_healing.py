"""How fast does a pruned student come back to its teacher, on its own samples?

A plain loop of transformers, without any of opdkit's machinery: sample, score, train. It decides
the layers and the learning rate of the main job. Divergence: reverse KL over the teacher's top
64 tokens with a tail bucket for training, over the full vocabulary for the evaluation.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opdkit.actors.models.pruning import prune_layers

TOP_K = 64
EVALUATION_BATCH = 32


class Healing:
    """A teacher, a student, its bfloat16 twin that samples, and what they are trained on."""

    def __init__(
        self, teacher_dir: Path, *, keep: Sequence[int], lr: float, max_new_tokens: int
    ) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(teacher_dir, padding_side="left")
        self.teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory() as scratch:
            student_dir = Path(scratch) / "student"
            prune_layers(teacher_dir, student_dir, keep=keep)
            self.sampler = AutoModelForCausalLM.from_pretrained(student_dir, dtype=torch.bfloat16)
            self.student = AutoModelForCausalLM.from_pretrained(student_dir, dtype=torch.float32)
        self.max_new_tokens = max_new_tokens
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    @torch.no_grad()
    def sample(self, conversations: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and a mask of the sampled tokens, both [batch, longest]."""
        for ours, theirs in zip(self.sampler.parameters(), self.student.parameters(), strict=True):
            ours.copy_(theirs)
        prompts = self.tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, return_tensors="pt", padding=True
        )
        output = self.sampler.generate(
            **prompts,
            max_new_tokens=self.max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        width = prompts["input_ids"].shape[1]
        rows = []
        for ids, mask in zip(output, prompts["attention_mask"], strict=True):
            reply = ids[width:]
            ends = (reply == self.tokenizer.eos_token_id).nonzero()
            num_reply = int(ends[0]) + 1 if len(ends) else len(reply)
            prompt = ids[:width][mask.bool()]
            rows.append((torch.cat([prompt, reply[:num_reply]]), num_reply))
        ids_BT = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
        mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, (ids, num_reply) in enumerate(rows):
            mask_BT[row, len(ids) - num_reply : len(ids)] = True
        return ids_BT, mask_BT

    @torch.no_grad()
    def teacher_logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [positions, vocabulary]."""
        return _logits_at(self.teacher, ids, mask).float().log_softmax(-1)

    def student_logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [positions, vocabulary], with a gradient."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = _logits_at(self.student, ids, mask)
        return logits.float().log_softmax(-1)

    def train_step(self, conversations: Sequence[Any]) -> tuple[float, int]:
        """Sample, score, train; return the loss in nats per token, and the tokens."""
        ids, mask = self.sample(conversations)
        log_p = self.teacher_logprobs(ids, mask)
        loss = _bucketed_reverse_kl(log_p, self.student_logprobs(ids, mask)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), len(log_p)

    @torch.no_grad()
    def evaluate(self, conversations: Sequence[Any]) -> dict[str, float]:
        """Return reverse KL on fresh samples of these prompts, in nats per token."""
        torch.manual_seed(1234)
        full = bucketed = 0.0
        num_tokens = 0
        for start in range(0, len(conversations), EVALUATION_BATCH):
            ids, mask = self.sample(conversations[start : start + EVALUATION_BATCH])
            log_p, log_q = self.teacher_logprobs(ids, mask), self.student_logprobs(ids, mask)
            full += (log_q.exp() * (log_q - log_p)).sum().item()
            bucketed += _bucketed_reverse_kl(log_p, log_q).sum().item()
            num_tokens += len(log_p)
        return {
            "reverse_kl": round(full / num_tokens, 4),
            "reverse_kl_top_k": round(bucketed / num_tokens, 4),
            "mean_reply_tokens": round(num_tokens / len(conversations), 1),
        }


def _logits_at(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(states[:, :-1][mask[:, 1:]])
    return logits


def _bucketed_reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    top_log_p, top = log_p.topk(TOP_K, dim=-1)
    top_log_q = log_q.gather(-1, top)
    outside = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, top, value=False)
    tail_log_p = log_p.masked_fill(~outside, -math.inf).logsumexp(-1)
    tail_log_q = log_q.masked_fill(~outside, -math.inf).logsumexp(-1)
    inside = (top_log_q.exp() * (top_log_q - top_log_p)).sum(-1)
    return inside + tail_log_q.exp() * (tail_log_q - tail_log_p)


def _conversations(path: Path) -> list[Any]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def main() -> None:
    """Train for a few steps and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--keep", required=True, help="layers of the student: 0,1,5,…")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--samples-per-step", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--num-held-out", type=int, default=64)
    parser.add_argument("--data", type=Path, default=Path("examples/data"))
    config = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    healing = Healing(
        config.teacher,
        keep=[int(layer) for layer in config.keep.split(",")],
        lr=config.lr,
        max_new_tokens=config.max_new_tokens,
    )
    train = _conversations(config.data / "prompts_train.jsonl")
    held_out = _conversations(config.data / "prompts_held_out.jsonl")[: config.num_held_out]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        healing.optimizer,
        lambda step: (
            min(1.0, (step + 1) / (config.warmup_steps + 1))
            * 0.5
            * (1 + math.cos(math.pi * step / config.num_steps))
        ),
    )
    start_s = time.process_time()
    before = healing.evaluate(held_out)
    sys.stderr.write(f"before {before}\n")
    losses = []
    torch.manual_seed(0)
    for step in range(config.num_steps):
        first = step * config.samples_per_step
        batch = [train[(first + i) % len(train)] for i in range(config.samples_per_step)]
        loss, num_tokens = healing.train_step(batch)
        schedule.step()
        losses.append(round(loss, 4))
        sys.stderr.write(f"step {step} loss {loss:.3f} tokens {num_tokens}\n")
    after = healing.evaluate(held_out)
    sys.stderr.write(f"after {after}\n")
    result = {
        "name": "student_healing",
        "commit": _commit(),
        "machine": platform.processor() or platform.machine(),
        "config": {key: str(value) for key, value in vars(config).items()},
        "figures": {
            "before": before,
            "after": after,
            "fall": round(1 - after["reverse_kl"] / before["reverse_kl"], 3),
            "losses": losses,
            "cpu_s": round(time.process_time() - start_s, 1),
        },
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
