"""The ``opdkit`` command: arguments in, exit code out.

Parsing loads next to nothing. A command's work is imported when it is called, so that
``--help`` and a mistake in a file answer at once; ``load`` is where that happens.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from opdkit import __version__
from opdkit.actors.broken_pipe import silence
from opdkit.protocols.errors import ConfigError, OpdkitError

DONE, JOB_FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 130

Load = Callable[[str], Callable[..., Any]]
"""From ``package.module:function`` to the function."""

_EPILOG = """\
exit codes:
  0    done
  1    the job failed, and the message names the cause; or a benchmark's bound does not hold
  2    the command line, the configuration, a model or the data is at fault; nothing was started
  130  interrupted (Ctrl-C or SIGTERM)

Colours and live progress appear on a terminal only; NO_COLOR=1 switches the colours off.
"""


def main(argv: Sequence[str] | None = None, *, load: Load | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; None: this process's.
        load: Finds a command's function; None: by import.
    """
    args = _parse(build_parser(), argv)
    # What a service manager sends ends a command as Ctrl-C does: cleanly.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        command = (load or import_function)(args.command)
        code: int = command(args, load or import_function)
        sys.stdout.flush()
    except OpdkitError as error:
        _tell(error, as_json=getattr(args, "json", False))
        return BAD_CONFIGURATION if isinstance(error, ConfigError) else JOB_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("opdkit: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)  # the reader has gone (``| head``)
        return DONE
    return code


def build_parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    parser = argparse.ArgumentParser(
        prog="opdkit",
        description="Asynchronous on-policy distillation of language models.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"opdkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_job_command(commands, "run", "run a job here, in the foreground; continue it if it began")
    _add_job_command(commands, "check", "say what is wrong with a job, without running it")
    _add_job_command(
        commands, "simulate", "say what the job would reach at given speeds, and what bounds it"
    )
    prepare = _add_command(commands, "prepare", "make the model folders that the examples name")
    prepare.add_argument("models", choices=("smollm2", "micro"), help="which models")
    prepare.add_argument("--dir", default="models", help="folder to make them in (%(default)s)")
    export = _add_command(commands, "export", "write a run's student in Hugging Face format")
    export.add_argument("run", metavar="RUN", help="directory of the run")
    export.add_argument("dir", metavar="DIR", help="folder to make")
    bench = _add_command(commands, "bench", "measure a part against its limit")
    bench.add_argument("name", metavar="NAME", nargs="?", help="which; left out: list them")
    bench.add_argument("--runs", type=int, metavar="N", help="repetitions behind each median")
    bench.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    bench.add_argument("--json", action="store_true", help="for programs: JSON on stdout")
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse, and let overrides stand behind options too, which argparse alone does not."""
    args, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(args, "overrides") and all(not x.startswith("-") for x in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def import_function(name: str) -> Callable[..., Any]:
    """Import ``package.module:function``."""
    module, _, function = name.partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return imported


def _add_command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=f"opdkit.actors.commands:{name}")
    return parser


def _add_job_command(commands: Any, name: str, summary: str) -> None:
    parser = _add_command(commands, name, summary)
    parser.add_argument("config", metavar="CONFIG", help="the job's YAML file")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="another value for a field, as in pipeline.num_steps=5 or teachers.0.model=DIR",
    )
    parser.add_argument("--json", action="store_true", help="for programs: JSON on stdout")


def _tell(error: OpdkitError, *, as_json: bool) -> None:
    message = str(error)
    if error.__cause__ is not None:
        message = f"{message}: {type(error.__cause__).__name__}: {error.__cause__}"
    if as_json:
        line = {"kind": "error", "error": type(error).__name__, "message": message}
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    label = "\x1b[1;31merror:\x1b[0m" if is_coloured else "error:"
    sys.stderr.write(f"opdkit: {label} {' '.join(message.split())}\n")


if __name__ == "__main__":
    sys.exit(main())
