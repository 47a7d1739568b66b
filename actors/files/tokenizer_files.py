"""What a tokenizer's files say: what two are compared by, and the chat template."""

import hashlib
import pathlib
from typing import Any

import msgspec

from opdkit.actors.files.json_files import read_object
from opdkit.protocols.errors import ConfigError


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
