"""All commands together, and what the shell sees when one ends."""

import logging
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import click
import typer

from protofed.cli.compare import compare_command
from protofed.cli.data import data_command
from protofed.cli.embed import embed_command
from protofed.cli.evaluate import evaluate_command
from protofed.cli.explain import explain_command
from protofed.cli.methods import methods_command
from protofed.cli.models import models_command
from protofed.cli.pretrain import pretrain_command
from protofed.cli.reproduce import reproduce_command
from protofed.cli.run import run_command
from protofed.cli.sweep import sweep_command
from protofed.errors import UserError

app = typer.Typer(
    name="protofed",
    help="Train on images that several sites hold and may not share, by exchanging prototypes or weights.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("run")(run_command)
app.command("compare")(compare_command)
app.command("sweep")(sweep_command)
app.command("reproduce")(reproduce_command)
app.command("pretrain")(pretrain_command)
app.command("explain")(explain_command)
app.command("evaluate")(evaluate_command)
app.command("embed")(embed_command)
app.command("methods")(methods_command)
app.command("data")(data_command)
app.command("models")(models_command)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 done, 1 internal failure, 2 a mistake of the user, 130 and 143 stopped by a signal."""
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        result = app(arguments, standalone_mode=False)
    except UserError as error:
        return _complain(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 0
    except click.ClickException as error:
        return _complain(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        return _stopped(130)
    except _Terminated:
        return _stopped(143)
    except BrokenPipeError:
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"error: internal failure: {type(error).__name__}", file=sys.stderr)
        return 1
    return result if isinstance(result, int) else 0


class _Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that workers end and the run can be resumed."""


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _stopped(code: int) -> int:
    print(
        "stopped; finished rounds are kept: run goes on with --resume, compare and sweep with the same words",
        file=sys.stderr,
    )
    return code


def _complain(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2
