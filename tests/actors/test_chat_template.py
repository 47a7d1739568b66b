# pyright: basic
"""Conversations become the ids that transformers makes of them."""

import pathlib
from typing import Any

import pytest

from opdkit.actors.chat_template import TokenizerTemplate
from opdkit.actors.files.model_files import read_model
from opdkit.actors.models.micro import make_micro_model
from opdkit.protocols.errors import ConfigError, PromptError
from tests.actors.model_folders import write_model

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2, né? 🙂\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b  "},
        {"role": "user", "content": "c <|im_end|> d"},
    ],
]


def test_ids_and_text_are_those_of_transformers(tmp_path: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    make_micro_model(tmp_path / "m")
    template = TokenizerTemplate(read_model(tmp_path / "m", field="x"), field="x")
    reference: Any = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert template.render(messages) == expected
        assert template.decode(expected) == reference.decode(expected, skip_special_tokens=True)
    text = "né 🙂 <|im_end|> x"
    assert template.encode(text) == reference.encode(text, add_special_tokens=False)


def test_a_prompt_is_one_id_a_byte_for_a_byte_tokenizer(tmp_path: pathlib.Path) -> None:
    folder = write_model(tmp_path / "m")
    tokenizer = TokenizerTemplate(read_model(folder, field="x"), field="x")
    # One id a byte: <|im_start|> user newline é é <|im_end|> newline <|im_start|> assistant newline
    ids = tokenizer.render([{"role": "user", "content": "éé"}])
    assert len(ids) == 1 + 5 + 4 + 1 + 1 + 1 + 10


def test_a_template_may_refuse_messages(tmp_path: pathlib.Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    folder = write_model(tmp_path / "m", template=template)
    tokenizer = TokenizerTemplate(read_model(folder, field="x"), field="x")
    with pytest.raises(PromptError, match="the chat template refuses the messages: no system"):
        tokenizer.render([{"role": "system", "content": "x"}])


def test_a_template_has_the_functions_that_models_use(tmp_path: pathlib.Path) -> None:
    template = (
        "{% for tool in tools %}{% if loop.first %}{{ tool | tojson }}{% break %}{% endif %}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ bos_token }}"
    )
    folder = write_model(tmp_path / "m", template=template)
    tokenizer = TokenizerTemplate(read_model(folder, field="x"), field="x")
    ids = tokenizer.render([{"role": "user", "content": "x"}], tools=[{"a": "é"}, {}])
    assert len(ids) == len('{"a": "é"}'.encode()) + 1 + 1


@pytest.mark.parametrize(
    ("template", "message"), [(None, "has no chat template"), ("{% if %}", "is broken")]
)
def test_a_model_without_a_template_is_refused(
    tmp_path: pathlib.Path, template: str | None, message: str
) -> None:
    folder = write_model(tmp_path / "m", template=template)
    with pytest.raises(ConfigError, match=message):
        TokenizerTemplate(read_model(folder, field="x"), field="student.model")
