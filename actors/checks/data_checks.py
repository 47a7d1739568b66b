"""Are the rows prompts, and do they fit the student's context?"""

from collections.abc import Iterator
from typing import Any

import msgspec

from opdkit.actors.checks.preflight_report import Finding, error, good, warning
from opdkit.actors.files.prompt_files import JsonlPrompts
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError, PromptError
from opdkit.protocols.roles import ChatTemplate

MAX_ROWS_MEASURED = 5000


class RowCounts(msgspec.Struct, kw_only=True):
    """What became of the rows of a file."""

    num_rows: int
    num_bad: int = 0
    first_bad: str = ""
    num_measured: int = 0
    num_too_long: int = 0
    first_too_long: str = ""
    num_cut: int = 0
    """Prompts that leave less than ``rollout.max_new_tokens``."""
    longest: int = 0
    """Tokens of the longest prompt."""


def check_data(spec: JobSpec, tokenizer: ChatTemplate | None) -> list[Finding]:
    """Read every row of the job's files, and measure up to ``MAX_ROWS_MEASURED`` of each.

    Args:
        spec: The job.
        tokenizer: The student's; None if it cannot be read: lengths are then not checked.
    """
    findings: list[Finding] = []
    epochs: list[Finding] = []
    files = {"data.train": spec.data.train, "data.held_out": spec.data.held_out}
    for field, path in files.items():
        if path is None:
            continue
        try:
            prompts = JsonlPrompts(path)
        except ConfigError as problem:
            findings.append(error(field, f"{field} is {path!r}: {problem}"))
            continue
        counts = _count(prompts, spec, tokenizer)
        findings += _judge(field, counts, spec)
        if field == "data.train":
            epochs += _epochs(spec, counts.num_rows)
    return findings + epochs


def _count(prompts: JsonlPrompts, spec: JobSpec, tokenizer: ChatTemplate | None) -> RowCounts:
    counts = RowCounts(num_rows=len(prompts))
    stride = -(-len(prompts) // MAX_ROWS_MEASURED)
    for index in range(len(prompts)):
        try:
            name, row = prompts.row_in_file(index)
            if tokenizer is not None and index % stride == 0:
                _measure(counts, name, _length(row, name, tokenizer), spec)
        except PromptError as problem:
            counts.num_bad += 1
            counts.first_bad = counts.first_bad or str(problem)
    return counts


def _length(row: dict[str, Any], name: str, tokenizer: ChatTemplate) -> int:
    messages = row["messages"]
    if messages[-1]["role"] == "assistant":  # The rollout drops it too.
        messages = messages[:-1]
    try:
        return len(tokenizer.render(messages, tools=row.get("tools") or ()))
    except PromptError as problem:
        raise PromptError(f"{name}: {problem}") from None


def _measure(counts: RowCounts, name: str, num_tokens: int, spec: JobSpec) -> None:
    counts.num_measured += 1
    counts.longest = max(counts.longest, num_tokens)
    if num_tokens >= spec.student.max_model_len:
        counts.num_too_long += 1
        counts.first_too_long = counts.first_too_long or f"{name} has {num_tokens} tokens"
    elif num_tokens + spec.rollout.max_new_tokens > spec.student.max_model_len:
        counts.num_cut += 1


def _judge(field: str, counts: RowCounts, spec: JobSpec) -> Iterator[Finding]:
    complaint = error if spec.data.bad_rows == "error" else warning
    advice = (
        "mend them, or set data.bad_rows=dead_letter to go without them"
        if spec.data.bad_rows == "error"
        else "each becomes a dead letter"
    )
    limit = spec.student.max_model_len
    if counts.num_bad:
        yield (error if counts.num_bad == counts.num_rows else complaint)(
            field,
            f"{counts.num_bad} of {counts.num_rows} rows are no prompts, the first: "
            f"{counts.first_bad}; {advice}",
        )
    if counts.num_too_long:
        yield (error if counts.num_too_long == counts.num_measured else complaint)(
            field,
            f"{counts.num_too_long} of {counts.num_measured} prompts leave no room in "
            f"student.max_model_len, {limit}; the first: {counts.first_too_long}; {advice}",
        )
    if counts.num_cut:
        yield warning(
            field,
            f"{counts.num_cut} of {counts.num_measured} prompts leave less than "
            f"rollout.max_new_tokens, {spec.rollout.max_new_tokens}, in student.max_model_len, "
            f"{limit}: their replies are cut short",
        )
    if not (counts.num_bad or counts.num_too_long or counts.num_cut):
        measured = f", the longest of {counts.num_measured:,} measured is {counts.longest:,} tokens"
        yield good(field, f"{counts.num_rows:,} prompts{measured if counts.num_measured else ''}")


def _epochs(spec: JobSpec, num_rows: int) -> Iterator[Finding]:
    needed = spec.pipeline.num_steps * spec.pipeline.samples_per_step
    per_epoch = num_rows * spec.data.samples_per_prompt
    if spec.data.num_epochs is not None and needed > per_epoch * spec.data.num_epochs:
        yield error(
            "epochs",
            f"data.num_epochs is {spec.data.num_epochs}, which gives "
            f"{per_epoch * spec.data.num_epochs} samples, but pipeline.num_steps times "
            f"pipeline.samples_per_step needs {needed}",
        )
        return
    most_tokens = needed * spec.rollout.max_turns * spec.rollout.max_new_tokens
    yield good(
        "epochs",
        f"{needed:,} samples, {needed / per_epoch:.2f} epochs, "
        f"at most {most_tokens:,} sampled tokens",
    )
