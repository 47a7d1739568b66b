# pyright: basic
# safetensors leaves parameters of its types open.
"""Micro models: loadable, lively and the same everywhere."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opdkit.actors.models.micro import Architecture, make_micro_model, make_micro_pair
from tests.actors.models.loading import load_model, load_tokenizer

PROMPT = [{"role": "user", "content": "What is the sun?"}]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_micro_models_load_and_speak(
    tmp_path: Path, architecture: Architecture, tied: bool
) -> None:
    make_micro_model(tmp_path / "model", architecture=architecture, tied=tied)
    model = load_model(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert model.config.model_type == architecture
    assert model.dtype == torch.float32
    shared = model.lm_head.weight is model.model.embed_tokens.weight
    assert shared is tied
    assert model.config.vocab_size == len(tokenizer)
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt")
    reply = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    reply = reply[prompt["input_ids"].shape[1] :].tolist()
    assert len(set(reply)) > len(reply) // 2, "the reply repeats itself"


def test_distributions_are_neither_flat_nor_certain(tmp_path: Path) -> None:
    make_micro_model(tmp_path / "model")
    model = load_model(tmp_path / "model")
    with torch.no_grad():
        log_p = model(input_ids=torch.arange(40, 104)[None]).logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    assert 2.0 < entropy < 5.0


def test_the_content_never_changes(tmp_path: Path) -> None:
    make_micro_model(tmp_path / "model")
    bpe = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]
    vocabulary = json.dumps([bpe["vocab"], bpe["merges"]], sort_keys=True).encode()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    values = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(weights.items()))
    assert hashlib.sha256(vocabulary).hexdigest()[:16] == "28edb944b8bb0096"
    assert hashlib.sha256(values).hexdigest()[:16] == "1acc97c898f4825d"


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_micro_model(tmp_path / str(seed), seed=seed)
    one, other = (load_file(tmp_path / str(seed) / "model.safetensors") for seed in (0, 1))
    assert all(not torch.equal(one[name], other[name]) for name in one)


def test_the_tokenizer_keeps_unicode(tmp_path: Path) -> None:
    make_micro_model(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    text = "naïve café, 你好 \U0001f642\n\tx = 12 + 100 <tag>  end "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_pair_shares_its_tokenizer_and_nearly_agrees(tmp_path: Path) -> None:
    folders = make_micro_pair(tmp_path)
    teacher, student = (load_model(folder) for folder in folders)
    assert (len(teacher.model.layers), len(student.model.layers)) == (4, 2)
    vocabularies = [load_tokenizer(folder).get_vocab() for folder in folders]
    assert vocabularies[0] == vocabularies[1]
    with torch.no_grad():
        ids = torch.arange(40, 104)[None]
        log_p, log_q = (model(input_ids=ids).logits.log_softmax(-1) for model in (teacher, student))
    reverse_kl = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    assert 0.1 < reverse_kl < 6.0
