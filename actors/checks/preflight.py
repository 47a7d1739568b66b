"""Everything about a job that can be known before a process is started.

Reads files and this machine's memory; starts nothing, imports neither torch nor vLLM nor Ray.
"""

from opdkit.actors.chat_template import TokenizerTemplate
from opdkit.actors.checks.data_checks import check_data
from opdkit.actors.checks.memory_estimates import Machine, check_memory, read_machine
from opdkit.actors.checks.model_checks import check_models
from opdkit.actors.checks.place_checks import check_gpus, check_run_directory
from opdkit.actors.checks.preflight_report import Finding, PreflightReport, error, good
from opdkit.actors.files.model_files import ModelFiles, read_model
from opdkit.engine.scheduling import make_scheduler
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError


def check_job(spec: JobSpec, *, machine: Machine | None = None) -> PreflightReport:
    """Check a job against its models, its data and the machine; find as much as possible at once.

    Args:
        spec: The job.
        machine: What memory and GPUs are compared with; None: this one.
    """
    machine = machine or read_machine()
    findings = check_run_directory(spec)
    student = _read("student", spec.student.model, findings)
    teacher = _read("teachers[0]", spec.teachers[0].model, findings)
    tokenizer = None
    if student is not None:
        tokenizer = _load_tokenizer(student, findings)
    if student is not None and teacher is not None:
        findings += check_models(spec, student, teacher)
    findings.append(_check_scheduler(spec))
    findings += check_data(spec, tokenizer)
    if student is not None and teacher is not None:
        findings += check_memory(spec, student, teacher, machine)
    findings += check_gpus(spec, machine.num_gpus)
    return PreflightReport(findings=tuple(findings))


def _read(name: str, path: str, findings: list[Finding]) -> ModelFiles | None:
    try:
        model = read_model(path, field=f"{name}.model")
    except ConfigError as problem:
        findings.append(error(name, str(problem)))
        return None
    facts = f"{model.shape.model_type}, {model.num_parameters / 1e6:,.1f} M parameters, {path}"
    findings.append(good(name, facts))
    return model


def _load_tokenizer(student: ModelFiles, findings: list[Finding]) -> TokenizerTemplate | None:
    try:
        return TokenizerTemplate(student, field="student.model")
    except ConfigError as problem:
        findings.append(error("chat template", str(problem)))
        return None


def _check_scheduler(spec: JobSpec) -> Finding:
    rollout = spec.rollout
    try:
        make_scheduler(rollout.scheduler, rollout.scheduler_options)
    except ConfigError as problem:
        return error("scheduler", str(problem))
    return good("scheduler", f"{rollout.scheduler}, at most {rollout.max_turns} turns")
