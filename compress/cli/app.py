"""The `compress` program: the commands, and how errors are printed."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from compress.distributed import destroy_process_group
from compress.errors import BudgetError, format_error
from compress.formatting import printable
from compress.startup import INTERRUPTED, restore_interrupts
from compress.version import __version__

from .bench import bench
from .export import export
from .landscape import landscape
from .options import error_console
from .output import robust_output
from .preview import preview
from .prune import prune
from .quickstart import quickstart
from .recipes import recipes
from .sensitivity import sensitivity
from .tradeoff import tradeoff

TRACEBACK_FLAG = "--traceback"  # removed by main, wherever it is on the command line
OPTION_OF_ARGUMENT = {  # argument of compress.prune in an error message -> option of the command line
    "example_inputs": "--input, as a shape such as 1,3,224,224",
    "train=LOADER": "--data",
    "span:": "--range",
    "variance_resolution=None": "--variance-resolution 0",
}

app = typer.Typer(
    help="Make a PyTorch vision network smaller and faster by exact structured pruning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (preview, prune, tradeoff, sensitivity, landscape, export, bench, recipes, quickstart):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _global_options(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    show_traceback: Annotated[
        bool, typer.Option(TRACEBACK_FLAG, help="with any command: show the traceback of an error")
    ] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def repeat_cfg_options(arguments: list[str]) -> list[str]:
    """Repeat `--cfg-options` before each of its values; mmdet's tools take several values after one option.

    >>> repeat_cfg_options(["prune", "--cfg-options", "a=1", "b=[1,2]", "--quiet"])
    ['prune', '--cfg-options', 'a=1', '--cfg-options', 'b=[1,2]', '--quiet']
    """
    result: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value and not argument.startswith("-") and result[-1] != "--cfg-options":
            result.append("--cfg-options")
        is_value = argument == "--cfg-options" or (is_value and not argument.startswith("-"))
        result.append(argument)
    return result


def main() -> None:
    """Run the command line; print an error in red, without a traceback unless `--traceback` is given.

    Exit codes: 0 done, 1 the budget cannot be met, 2 invalid input, 130 interrupted, 141 the reader of a pipe has gone,
    143 terminated.
    """
    restore_interrupts()
    with robust_output():
        _run()


def _run() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != TRACEBACK_FLAG]
    try:
        app(repeat_cfg_options(arguments))
    except SystemExit as end:
        if end.code == INTERRUPTED:
            error_console.print("interrupted", style="red")
        raise
    except Exception as error:
        _print_error(error)
        raise SystemExit(1 if isinstance(error, BudgetError) else 2) from None
    finally:
        destroy_process_group()


def _print_error(error: Exception) -> None:
    message = format_error(error)
    hints = [
        f"On the command line {argument} is {option}"
        for argument, option in OPTION_OF_ARGUMENT.items()
        if argument in message
    ]
    if TRACEBACK_FLAG in sys.argv:
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    elif message != str(error):
        hints.append(f"Add {TRACEBACK_FLAG} to see the traceback")
    text = "\n".join([message, *getattr(error, "__notes__", []), *hints])
    error_console.print(printable(text), style="red", markup=False, highlight=False)
