"""The packaged weights, found and converted."""

from pathlib import Path

import pytest
import torch

from opdkit.actors.models import smollm2
from opdkit.actors.models.commands import STUDENT_LAYERS, prepare_smollm2
from opdkit.protocols.errors import ConfigError
from tests.actors.models.loading import load_model, load_tokenizer


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="no-such-package, which is not installed"):
        smollm2.prepare_teacher(tmp_path / "teacher")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_packaged_weights_answer_as_known(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare_smollm2(tmp_path, report=lines.append)
    teacher_dir, student_dir = tmp_path / "smollm2-135m", tmp_path / "smollm2-student"
    tokenizer = load_tokenizer(teacher_dir)
    model = load_model(teacher_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    reply = tokenizer.decode(reply[prompt["input_ids"].shape[1] :])
    assert reply == "The capital of France is Paris.<|im_end|>"
    student = load_model(student_dir)
    assert len(student.model.layers) == len(STUDENT_LAYERS)
    prepare_smollm2(tmp_path, report=lines.append)
    assert [": made" in line for line in lines] == [True, True, False, False]
