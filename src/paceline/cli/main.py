"""The program `paceline`: parse, run, print, and turn what went wrong into an exit code."""

import contextlib
import errno
import io
import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import typer

from paceline import __version__
from paceline.cli import (
    align,
    codec_report,
    doctor,
    evaluate,
    exchange,
    export,
    extract,
    generate,
    housekeeping,
    inspect,
    plan,
    prepare,
    replay,
    report,
    run,
    train,
    watch,
)
from paceline.cli.command import Command, Request, add_command
from paceline.cli.output import Output, is_first_rank, quiet_libraries, set_up_logging
from paceline.errors import DiskFullError, PacelineError, UsageError

logger = logging.getLogger(__name__)

COMMANDS: tuple[Command, ...] = (
    run.COMMAND,
    plan.COMMAND,
    generate.COMMAND,
    prepare.COMMAND,
    extract.COMMAND,
    align.COMMAND,
    train.COMMAND,
    evaluate.COMMAND,
    export.COMMAND,
    report.COMMAND,
    inspect.COMMAND,
    watch.COMMAND,
    replay.COMMAND,
    doctor.COMMAND,
    codec_report.COMMAND,
    exchange.IMPORT_COMMAND,
    exchange.EXPORT_COMMAND,
    *housekeeping.COMMANDS,
)
_ABOUT = (
    "From a target model and chat data to an EAGLE-3 draft that vLLM and SGLang serve, every "
    "number checked."
)
INTERRUPTED, TERMINATED = 130, 143
_OPEN_FILES = 1 << 16
# What a path that was given cannot be: not this user's, on a disk that is read alone, below a file.
_REFUSED_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)


class Terminated(BaseException):
    """SIGTERM as an exception: `with` blocks end, locks go, what was published stays."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 / 143 stopped by a signal."""
    sys.exit(_main(list(sys.argv[1:] if arguments is None else arguments)))


def _main(arguments: list[str]) -> int:
    request, code, message = _parse(arguments)
    if request is None:
        sys.stderr.write(message)
        if code and "--json" in arguments:
            text = message.strip().rpartition("Error: ")[2]
            json.dump(_failure(UsageError, text, code), sys.stdout)
            sys.stdout.write("\n")
        return code
    quiet_libraries()
    set_up_logging()
    _allow_open_files()
    with Output(request.as_json) as output, _terminated_by_exception():
        result, code = _guarded(request, partial(_execute, request))
        if not request.command.on_ranks or is_first_rank():
            _, failed = _guarded(request, partial(_tell, request, result, output))
            code = failed or code
    return code


def _allow_open_files() -> None:
    """Large stores are read through hundreds of open shards; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a lower limit than the one it tells, and refuses what is above.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _parse(arguments: list[str]) -> tuple[Request | None, int, str]:
    """The request of a command line, or the exit code and message of one that asks for none."""
    requests: list[Request] = []
    app = typer.Typer(
        name="paceline",
        help=_ABOUT,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_program)
    for command in COMMANDS:
        add_command(app, command, requests.append)
    message = io.StringIO()
    code = 0
    try:
        with contextlib.redirect_stderr(message):
            app(arguments, prog_name="paceline")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    return (requests[0] if requests else None), code, message.getvalue()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


def _program(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Options of the program itself; each command has its own."""


def _execute(request: Request) -> tuple[dict[str, Any], int]:
    """Do the work: its result and the exit code."""
    result = request.run()
    problems = request.command.problems(result)
    for problem in problems:
        logger.error("%s", problem)
    return result, 1 if problems else 0


def _tell(request: Request, result: dict[str, Any], output: Output) -> tuple[dict[str, Any], int]:
    """Print a result, or write it as JSON."""
    try:
        if "error" not in result and not request.as_json:
            request.command.show(result, output.console)
        output.finish(result)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python must not complain when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result, 0


def _guarded(
    request: Request, step: Callable[[], tuple[dict[str, Any], int]]
) -> tuple[dict[str, Any], int]:
    """What a step gives, or a failure that says what to do, and its exit code."""
    try:
        return step()
    except PacelineError as error:
        return _failed(error, error.exit_code, request)
    except OSError as error:
        if error.errno in _REFUSED_PATHS and error.filename:
            refused = UsageError(
                f"{error.filename}: {error.strerror}: name another path, or change what this user "
                "may do there"
            )
            return _failed(refused, refused.exit_code, request)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _failed(error, 1, request, unexpected=True)
        full = DiskFullError(
            f"{error.filename or 'the disk'}: no space left. What was finished is kept; make room "
            "and give the same command again."
        )
        return _failed(full, full.exit_code, request)
    except KeyboardInterrupt as error:
        return _failed(error, INTERRUPTED, request)
    except Terminated as error:
        return _failed(error, TERMINATED, request)
    except Exception as error:  # the program's last line of defence: no traceback for users
        return _failed(error, 1, request, unexpected=True)


def _failed(
    error: BaseException, code: int, request: Request, unexpected: bool = False
) -> tuple[dict[str, Any], int]:
    text = str(error)
    if code in (INTERRUPTED, TERMINATED):
        text = "stopped; what was finished is kept, the same command goes on"
        logger.error("%s", text)
    elif unexpected:
        hint = "" if request.debug else " (--debug shows where)"
        logger.error("unexpected %s: %s%s", type(error).__name__, text, hint)
    else:
        logger.error("%s", text)
    if request.debug:
        traceback.print_exception(error, file=sys.stderr)
    return _failure(type(error), text, code), code


def _failure(kind: type[BaseException], text: str, code: int) -> dict[str, Any]:
    return {"error": {"kind": kind.__name__, "message": text, "exit_code": code}}


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    def terminate(_number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
