"""A model folder is made whole or not at all, and carries the digests of its files.

It is written beside its place and renamed. A second process that makes the same folder at the
same time finds the first one's and keeps it.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from opdkit.protocols.errors import ConfigError

MANIFEST_NAME = "manifest.json"


class FolderManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a model folder was made from, and what it holds."""

    recipe: str
    """Source and every setting that decides the content."""
    sha256: dict[str, str]
    """Hex digest of each file."""


def make_folder(directory: Path, write: Callable[[Path], None], *, recipe: str) -> bool:
    """Fill a new folder by ``write``, or check the one that is there.

    Returns:
        Whether the folder was made now; False: it was there, with this recipe, undamaged.

    Raises:
        ConfigError: the folder is there, but of another recipe, changed or incomplete.
    """
    if directory.exists():
        check_folder(directory, recipe=recipe)
        return False
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=f".{directory.name}.", ignore_cleanup_errors=True
    ) as scratch:
        draft = Path(scratch) / "folder"
        draft.mkdir()
        write(draft)
        for path in draft.iterdir():
            # safetensors writes for the owner alone.
            path.chmod(0o644)
        manifest = FolderManifest(recipe=recipe, sha256=_digests(draft))
        (draft / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        try:
            draft.rename(directory)
        except OSError:
            if not directory.exists():
                raise
            check_folder(directory, recipe=recipe)
            return False
    return True


def check_folder(directory: Path, *, recipe: str) -> None:
    """Compare a folder with its manifest and with the recipe that is wanted.

    Raises:
        ConfigError: naming the folder, and the recipe or the file that differs.
    """
    try:
        manifest = msgspec.json.decode(
            (directory / MANIFEST_NAME).read_bytes(), type=FolderManifest
        )
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{directory} is there, but {MANIFEST_NAME} in it cannot be read ({error}): "
            "it was not made by opdkit; move it away or choose another folder"
        ) from error
    if manifest.recipe != recipe:
        raise ConfigError(
            f"{directory} was made as {manifest.recipe!r}, but {recipe!r} is wanted: "
            "delete it or choose another folder"
        )
    found = _digests(directory)
    for name, sha256 in manifest.sha256.items():
        if found.get(name) != sha256:
            raise ConfigError(
                f"{directory / name} has SHA-256 {found.get(name, 'none: no such file')}, but "
                f"{MANIFEST_NAME} says {sha256}: delete {directory} and make it again"
            )


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.name: sha256_of(path)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST_NAME
    }
