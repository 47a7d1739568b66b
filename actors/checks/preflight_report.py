"""What a check of a job found: for the coordinator, for people and for programs."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from opdkit.protocols.errors import ConfigError

Level = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    """What was looked at: ``student``, ``tokenizers``, ``prompts``, …"""
    level: Level
    message: str


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings for which the job cannot run."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    def require(self) -> None:
        """Do nothing if the job can run.

        Raises:
            ConfigError: it cannot; with every reason.
        """
        if self.errors:
            raise ConfigError("; ".join(finding.message for finding in self.errors))


def report_values(report: PreflightReport) -> dict[str, Any]:
    """Return plain values, with the verdict as ``ok``."""
    values: dict[str, Any] = msgspec.to_builtins(report)
    return {"ok": not report.errors, **values}


def good(check: str, message: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check=check, level="ok", message=message)


def warning(check: str, message: str) -> Finding:
    """Return a finding that the job runs, but perhaps not as wanted."""
    return Finding(check=check, level="warning", message=message)


def error(check: str, message: str) -> Finding:
    """Return a finding that the job cannot run."""
    return Finding(check=check, level="error", message=message)


def or_good(check: str, problems: Iterable[Finding], message: str) -> list[Finding]:
    """Return the problems; without any, the finding that all is well."""
    return list(problems) or [good(check, message)]
