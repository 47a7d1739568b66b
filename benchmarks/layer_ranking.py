"""Which layers of the teacher does a pruned student miss least?

Writes the divergence when a block of consecutive layers is left out, for each block, and with
``--greedy`` the order in which a search layer by layer leaves them out (minutes on one core).
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opdkit.actors.models.layer_ranking import greedy_replies, rank_blocks, rank_layers


def main() -> None:
    """Measure and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("examples/data/prompts_train.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--num-drops", type=int, default=8)
    parser.add_argument("--greedy", action="store_true", help="search layer by layer too")
    config = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(config.teacher)
    model = AutoModelForCausalLM.from_pretrained(config.teacher, dtype=torch.bfloat16)
    lines = config.prompts.read_text().splitlines()
    # The file goes through the categories in turn: its beginning has all of them.
    conversations = [json.loads(line)["messages"] for line in lines[: config.num_prompts]]
    start_s = time.process_time()
    replies = greedy_replies(model, tokenizer, conversations, max_new_tokens=config.max_new_tokens)
    blocks = rank_blocks(model, replies, num_layers=config.num_drops)
    drops = rank_layers(model, replies, num_drops=config.num_drops) if config.greedy else []
    result = {
        "name": "layer_ranking",
        "commit": _commit(),
        "machine": platform.processor() or platform.machine(),
        "config": {key: str(value) for key, value in vars(config).items()},
        "figures": {
            "num_reply_tokens": sum(
                len(reply.token_ids) - reply.num_prompt_tokens for reply in replies
            ),
            "cpu_s": round(time.process_time() - start_s, 1),
            "blocks": [{"first": block.layer, "kl": round(block.kl, 4)} for block in blocks],
            "greedy": [{"layer": drop.layer, "kl": round(drop.kl, 4)} for drop in drops],
        },
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
