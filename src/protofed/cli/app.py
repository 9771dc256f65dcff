"""All commands together, and what the shell sees when one ends."""

import errno
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn

import click
import typer

from protofed.cli.audit import audit_command
from protofed.cli.compare import compare_command
from protofed.cli.config import config_command
from protofed.cli.data import data_command
from protofed.cli.deploy import deploy_app
from protofed.cli.embed import embed_command
from protofed.cli.evaluate import evaluate_command
from protofed.cli.explain import explain_command
from protofed.cli.export import export_command
from protofed.cli.first_steps import show_first_steps
from protofed.cli.forget import forget_command
from protofed.cli.join import join_command
from protofed.cli.methods import methods_command
from protofed.cli.models import models_command
from protofed.cli.predict import predict_command
from protofed.cli.pretrain import pretrain_command
from protofed.cli.report import report_command
from protofed.cli.reproduce import reproduce_command
from protofed.cli.run import run_command
from protofed.cli.stopping import INTERRUPTED, TERMINATED, Stopped, Terminated
from protofed.cli.sweep import sweep_command
from protofed.cli.watch import watch_command
from protofed.errors import BadMessage, UserError
from protofed.system import disk_trouble
from protofed.text import printable

_GOES_ON = "stopped; finished work is kept, and the same command continues from there"

app = typer.Typer(
    name="protofed",
    help="Train on images that several sites hold and may not share, by exchanging prototypes or weights.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Click has suggestions of its own.
    suggest_commands=False,
)
_COMMANDS: dict[str, dict[str, Callable[..., Any]]] = {
    "Train": {
        "run": run_command,
        "compare": compare_command,
        "sweep": sweep_command,
        "reproduce": reproduce_command,
        "pretrain": pretrain_command,
    },
    "Between institutions": {"join": join_command, "forget": forget_command},
    "Inspect": {
        "report": report_command,
        "watch": watch_command,
        "explain": explain_command,
        "embed": embed_command,
        "audit": audit_command,
    },
    "Use it": {
        "config": config_command,
        "evaluate": evaluate_command,
        "predict": predict_command,
        "export": export_command,
    },
    "Catalogues": {"methods": methods_command, "data": data_command, "models": models_command},
}
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(deploy_app, name="deploy", rich_help_panel="Between institutions")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"protofed {version('protofed')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # `_show_version` has acted on it
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Train on images that several sites hold and may not share, by exchanging prototypes or weights."""
    if context.invoked_subcommand is None:
        show_first_steps()


_FULL = (errno.ENOSPC, errno.EDQUOT)
_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
_OF_THE_MACHINE = (*_FULL, *_PLACE)
"""Errors that say what is wrong with a place the user has chosen."""
_REMEDIES = dict.fromkeys(_FULL, "; finished work is kept: free some space and continue with --resume")


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Nothing but warnings, on standard error; afterwards logging is as it was, for `main` may be part of a program."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


@_warnings_on_stderr()
def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    0: done; 1: internal failure; 2: a mistake of the user; 3: a run that went wrong; 130 and 143: stopped by a signal.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = app(arguments, standalone_mode=False)
    except UserError as error:
        return _print_error(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        return error.exit_code  # the help, which has been shown, is the message
    except click.ClickException as error:
        return _print_error(error.format_message())
    except Stopped as stopped:
        return _say_stopped(str(stopped), stopped.code)
    except (KeyboardInterrupt, click.Abort):
        return _say_stopped(_GOES_ON, INTERRUPTED)
    except Terminated:
        return _say_stopped(_GOES_ON, TERMINATED)
    except BadMessage as error:
        return _print_error(f"a file of the run is damaged: {printable(str(error))}")
    except BrokenPipeError:
        return 1
    except OSError as error:
        if (trouble := disk_trouble(error)) is None:
            return _internal_failure(error)
        return _print_error(f"{trouble}, and the same command, or a run with --resume, continues from there")
    except Exception as error:
        return _internal_failure(error)
    if result == INTERRUPTED:  # typer turns Ctrl-C into this
        return _say_stopped(_GOES_ON, INTERRUPTED)
    return result if isinstance(result, int) else 0


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _internal_failure(error: Exception) -> int:
    traceback.print_exception(error)
    print(f"error: internal failure: {type(error).__name__}", file=sys.stderr)
    return 1


def _say_stopped(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _print_error(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2
