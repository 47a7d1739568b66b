# pyright: basic
"""The student's tokenizer and chat template, through transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from opdkit.protocols.errors import ConfigError, PromptError


class TokenizerTemplate:
    """A ``ChatTemplate`` over the tokenizer of a model folder."""

    def __init__(self, model: str) -> None:
        # Any: what transformers returns depends on the arguments in ways its types do not follow.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"student.model {model} has no chat template: add chat_template.jinja to the folder"
            )

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[object] = ()
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant is to speak.

        Raises:
            PromptError: the template refuses the messages.
        """
        try:
            encoded = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return list(encoded["input_ids"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, special tokens not added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
