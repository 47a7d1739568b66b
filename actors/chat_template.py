"""The student's tokenizer and chat template.

The template is rendered with jinja2 and the text encoded with tokenizers, as transformers does;
but neither a check nor a rollout worker then loads transformers and torch, for seconds and
hundreds of megabytes. tests/actors/test_chat_template.py compares the two.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from opdkit.actors.files.model_files import ModelFiles
from opdkit.protocols.errors import ConfigError, PromptError


class TokenizerTemplate:
    """A ``ChatTemplate`` made from the files of a model folder."""

    def __init__(self, model: ModelFiles, *, field: str) -> None:
        """Load the tokenizer and compile its template.

        Args:
            model: the folder.
            field: name of the configuration field that gave it, for the messages.

        Raises:
            ConfigError: there is no chat template, or it is no Jinja.
        """
        template = model.tokenizer.chat_template
        if template is None:
            raise ConfigError(
                f"{field}: {model.path} has no chat template; put a chat_template.jinja there"
            )
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise ConfigError(
                f"{field}: the chat template of {model.path} is broken: {error}"
            ) from None
        self._named_tokens = model.tokenizer.named_tokens
        self._tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant is to speak.

        Raises:
            PromptError: the template refuses the messages.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from None
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text, of special tokens that stand in it too; none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = _now_as
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _now_as(form: str) -> str:
    return datetime.datetime.now().strftime(form)
