"""What ``opdkit prepare`` does: the model folders that the examples name."""

from collections.abc import Callable, Sequence
from pathlib import Path

from opdkit.actors.models.micro import make_micro_pair
from opdkit.actors.models.pruning import prune_layers
from opdkit.actors.models.smollm2 import prepare_teacher

TEACHER_NAME = "smollm2-135m"
STUDENT_NAME = "smollm2-student"
MICRO_NAME = "micro"

STUDENT_LAYERS = (*range(12), *range(20, 30))
"""Of the teacher's thirty: chosen by measurement, see docs/student.md."""


def prepare_smollm2(
    directory: Path,
    *,
    report: Callable[[str], None],
    keep_layers: Sequence[int] | None = None,
) -> None:
    """Make the teacher and the student of the main job in two folders of ``directory``.

    What is there already is checked and kept.

    Args:
        directory: Usually ``models``.
        report: Gets one line of text for each folder.
        keep_layers: Layers of the student; None: ``STUDENT_LAYERS``.

    Raises:
        ConfigError: the package of weights is missing, a folder has another content, or the
            layers are not the teacher's.
    """
    kept = STUDENT_LAYERS if keep_layers is None else keep_layers
    teacher, student = directory / TEACHER_NAME, directory / STUDENT_NAME
    _report(report, teacher, made=prepare_teacher(teacher), content="SmolLM2-135M-Instruct")
    content = f"{len(kept)} of its layers: {', '.join(map(str, kept))}"
    _report(report, student, made=prune_layers(teacher, student, keep=kept), content=content)


def prepare_micro(directory: Path, *, report: Callable[[str], None]) -> None:
    """Make the random teacher and student of ``examples/micro.yaml``.

    Raises:
        ConfigError: a folder is there, with another content.
    """
    teacher, student = make_micro_pair(directory / MICRO_NAME)
    report(f"{teacher}, {student}: ready (random weights)")


def _report(report: Callable[[str], None], folder: Path, *, made: bool, content: str) -> None:
    report(f"{folder}: {'made' if made else 'already there, checked'} ({content})")
