"""Do the models fit each other, the loss and the trainer's grid? Pure functions."""

from collections.abc import Iterator

from opdkit.actors.checks.preflight_report import Finding, error, or_good, warning
from opdkit.actors.files.model_files import ModelFiles
from opdkit.protocols.config import EngineSection, JobSpec
from opdkit.protocols.messages import FLOAT32_BYTES, INT32_BYTES

MIB = 2**20


def check_models(spec: JobSpec, student: ModelFiles, teacher: ModelFiles) -> list[Finding]:
    """Return what follows from both models' files; ``teacher`` is the first of the job."""
    same_ids = student.tokenizer.num_ids
    return [
        *or_good("context", _contexts(spec, student, teacher), "both models reach that far"),
        *or_good("tokenizers", _tokenizers(student, teacher), f"the same {same_ids:,} ids"),
        *or_good(
            "end of sequence",
            _ends(spec, student, teacher),
            f"both end at {_listed(student.eos_token_ids)}",
        ),
        *or_good("logits", _widths(student, teacher), _width_facts(student, teacher)),
        *or_good("support", _support(spec, student), _support_facts(spec, same_ids)),
        *or_good("grid", _grid(spec, student), _grid_facts(spec)),
    ]


def payload_bytes_per_position(spec: JobSpec, num_ids: int) -> int:
    """Return the bytes that the teacher's scores take at one supervised position."""
    fixed = 2 * FLOAT32_BYTES
    if spec.loss.support == "full":
        return fixed + num_ids * FLOAT32_BYTES
    return fixed + spec.loss.top_k * (INT32_BYTES + FLOAT32_BYTES)


def largest_batch_bytes(spec: JobSpec, num_ids: int) -> int:
    """Return the bytes of scores of one batch in which each reply is as long as it can be."""
    most_sampled = spec.rollout.max_new_tokens * spec.rollout.max_turns
    positions = min(most_sampled, spec.student.max_model_len - 1)
    samples = spec.pipeline.samples_per_step
    return samples * positions * payload_bytes_per_position(spec, num_ids)


def _contexts(spec: JobSpec, student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    sections: list[tuple[str, EngineSection, ModelFiles]] = [
        ("student", spec.student, student),
        ("teachers[0]", spec.teachers[0], teacher),
    ]
    for name, section, model in sections:
        if section.max_model_len > model.shape.max_positions:
            yield error(
                "context",
                f"{name}.max_model_len is {section.max_model_len}, but must be at most "
                f"{model.shape.max_positions}, max_position_embeddings of {str(model.path)!r}",
            )


def _tokenizers(student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    ours, theirs = student.tokenizer, teacher.tokenizer
    parts = {
        "vocabulary": (ours.vocab_digest, theirs.vocab_digest),
        "merges": (ours.merges_digest, theirs.merges_digest),
        "added tokens": (ours.added_digest, theirs.added_digest),
    }
    differing = [part for part, (a, b) in parts.items() if a != b]
    if differing:
        yield error(
            "tokenizers",
            f"student.model {str(student.path)!r} ({ours.num_ids} ids) and teachers[0].model "
            f"{str(teacher.path)!r} ({theirs.num_ids} ids) have other {' and '.join(differing)}: "
            "one tokenizer is needed, since the teacher scores the student's ids",
        )


def _ends(spec: JobSpec, student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    check = "end of sequence"
    stops = {*student.eos_token_ids, *spec.rollout.stop_token_ids}
    missed = sorted(set(teacher.eos_token_ids) - stops)
    both = (
        f"teachers[0] ends at {_listed(teacher.eos_token_ids)}, "
        f"the student at {_listed(student.eos_token_ids)}"
    )
    if not stops:
        yield error(check, f"{both}: no reply would ever end; give rollout.stop_token_ids")
    elif missed:
        wanted = sorted({*spec.rollout.stop_token_ids, *missed})
        yield error(
            check,
            f"{both}: replies would go on where the teacher ends them; set "
            f"rollout.stop_token_ids={wanted}, or give both models the same eos_token_id",
        )
    elif extra := sorted(set(student.eos_token_ids) - set(teacher.eos_token_ids)):
        yield warning(check, f"{both}: the teacher does not end replies at {_listed(extra)}")
    if unknown := sorted(i for i in stops if not 0 <= i < student.tokenizer.num_ids):
        yield error(
            check,
            f"replies are to end at {_listed(unknown)}, but ids must be in "
            f"[0, {student.tokenizer.num_ids})",
        )
    if (ours := student.pad_token_id) != (theirs := teacher.pad_token_id):
        yield warning(check, f"pad_token_id is {ours} in the student, {theirs} in teachers[0]")
    if (ours := student.bos_token_id) != (theirs := teacher.bos_token_id):
        yield warning(check, f"bos_token_id is {ours} in the student, {theirs} in teachers[0]")


def _widths(student: ModelFiles, teacher: ModelFiles) -> Iterator[Finding]:
    for name, model in (("student", student), ("teachers[0]", teacher)):
        if model.shape.logit_width < model.tokenizer.num_ids:
            yield error(
                "logits",
                f"{name}: vocab_size is {model.shape.logit_width} in config.json, but the "
                f"tokenizer has {model.tokenizer.num_ids} ids",
            )


def _width_facts(student: ModelFiles, teacher: ModelFiles) -> str:
    ours, theirs = student.shape.logit_width, teacher.shape.logit_width
    if ours == theirs:
        return f"both are {ours:,} wide"
    return (
        f"{ours:,} wide in the student, {theirs:,} in the teacher: "
        f"compared over the {student.tokenizer.num_ids:,} ids of the tokenizer"
    )


def _support(spec: JobSpec, student: ModelFiles) -> Iterator[Finding]:
    num_ids = student.tokenizer.num_ids
    if spec.loss.support == "top_k" and spec.loss.top_k > num_ids:
        yield error(
            "support",
            f"loss.top_k is {spec.loss.top_k}, but must be at most {num_ids}, the vocabulary",
        )
        return
    if spec.rollout.top_k > num_ids:
        yield error(
            "support",
            f"rollout.top_k is {spec.rollout.top_k}, but must be at most {num_ids}, the vocabulary",
        )
    batch_mib = -(-largest_batch_bytes(spec, num_ids) // MIB)
    if batch_mib > spec.pipeline.queue_mib:
        yield error(
            "support",
            f"pipeline.queue_mib is {spec.pipeline.queue_mib}, but a batch of "
            f"{spec.pipeline.samples_per_step} samples with loss.support {spec.loss.support!r} "
            f"over {num_ids} ids can take {batch_mib} MiB: raise it, or lower loss.top_k, "
            "rollout.max_new_tokens or pipeline.samples_per_step",
        )


def _support_facts(spec: JobSpec, num_ids: int) -> str:
    tokens = f"top {spec.loss.top_k}" if spec.loss.support == "top_k" else f"all {num_ids:,} tokens"
    size = largest_batch_bytes(spec, num_ids) / MIB
    return f"the teacher's {tokens}, at most {size:.1f} MiB of scores a batch"


def _grid_facts(spec: JobSpec) -> str:
    parallel = spec.trainer.parallel
    return f"{parallel.world_size} rank(s): data {parallel.data} x tensor {parallel.tensor}"


def _grid(spec: JobSpec, student: ModelFiles) -> Iterator[Finding]:
    # Not the vocabulary: the trainer pads it.
    size = spec.trainer.parallel.tensor
    shape = student.shape
    divided = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
    }
    for name, value in divided.items():
        if value % size:
            yield error(
                "grid",
                f"trainer.parallel.tensor is {size}, but must divide the student's {name}, {value}",
            )


def _listed(ids: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ids)) or "no id"
