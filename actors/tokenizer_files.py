"""What a tokenizer's files say: what two are compared by, and how long a prompt is.

The template is rendered with jinja2 and the text encoded with tokenizers, as transformers does, so
that a check needs neither transformers nor torch.
"""

import datetime
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opdkit.actors.json_files import read_object
from opdkit.protocols.errors import ConfigError, PromptError


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What two tokenizers are compared by."""

    num_ids: int
    """One more than the largest id in use: the real vocabulary."""
    vocab_digest: str
    """Of token to id, added tokens included."""
    merges_digest: str
    added_digest: str
    """Of the added tokens and their flags."""
    ids: dict[str, int]
    """Ids of the added tokens, by text."""
    chat_template: str | None
    named_tokens: dict[str, str]
    """``bos_token``, ``eos_token``, … as far as they are set."""


def read_tokenizer(folder: pathlib.Path, *, field: str) -> TokenizerFiles:
    """Read tokenizer.json and its settings.

    Raises:
        ConfigError: there is none, or it is not of the fast format.
    """
    tokenizer = read_object(folder / "tokenizer.json", field=field)
    settings_path = folder / "tokenizer_config.json"
    settings = read_object(settings_path, field=field) if settings_path.exists() else {}
    model = tokenizer.get("model", {})
    added = {item["content"]: item["id"] for item in tokenizer.get("added_tokens", [])}
    vocab = model.get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [[token, score], …] in the order of ids.
        vocab = {token: index for index, (token, _) in enumerate(vocab)}
    vocab = vocab | added
    if not vocab:
        raise ConfigError(f"{field}: {folder / 'tokenizer.json'} has no vocabulary")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    flags = [sorted(item.items()) for item in tokenizer.get("added_tokens", [])]
    return TokenizerFiles(
        num_ids=max(vocab.values()) + 1,
        vocab_digest=_digest(sorted(vocab.items())),
        merges_digest=_digest(merges),
        added_digest=_digest(flags),
        ids=added,
        chat_template=_chat_template(folder, settings),
        named_tokens=_named_tokens(settings),
    )


class PromptTokenizer:
    """Counts the tokens of a conversation."""

    def __init__(self, folder: pathlib.Path, files: TokenizerFiles, *, field: str) -> None:
        """Load the tokenizer and compile its template.

        Raises:
            ConfigError: there is no chat template, or it is no Jinja.
        """
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        if files.chat_template is None:
            raise ConfigError(f"{field}: {folder} has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = _now_as
        self._template_error = TemplateError
        try:
            self._template = environment.from_string(files.chat_template)
        except TemplateError as error:
            raise ConfigError(
                f"{field}: the chat template of {folder} is broken: {error}"
            ) from None
        self._named_tokens = files.named_tokens
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def count(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = ()) -> int:
        """Return the number of tokens up to where the assistant is to speak.

        Raises:
            PromptError: the template refuses the messages.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except self._template_error as error:
            raise PromptError(f"the chat template refuses it: {error}") from None
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now_as(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # Several, by name.
        return next((item["template"] for item in template if item["name"] == "default"), None)
    return template


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            named[key] = token
    return named


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()
