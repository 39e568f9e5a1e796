"""The ``fusedmoe`` command: parses the arguments and calls the module of the subcommand.

Exit status: 0 for success; 1 for an error, whose message names the remedy; 2 for wrong options, and for
`verify` without a GPU; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from fusedmoe.base.errors import InputError
from fusedmoe.commands.options import add_arguments
from fusedmoe.version import __version__


class Command(NamedTuple):
    """The texts of a subcommand.

    The module ``fusedmoe.commands.<name>``, or ``fusedmoe.commands.<name>.command`` if the subcommand has a folder,
    defines ``run(options)``, which returns the exit status, or raises `InputError` for wrong options. ``options`` is an
    instance of the module's class ``<Name>Options``. If it has none, it is the namespace, and the module defines
    ``add_arguments(parser)``.
    """

    help: str
    description: str
    interrupted: str = ""  # printed after a Ctrl-C
    folder: bool = False


COMMANDS = {
    "doctor": Command(
        "report this machine's software and GPUs, and the available kernels",
        "Report this machine's software and GPUs, which kernels are available, and why others are not.",
    ),
    "demo": Command(
        "train a byte-level MoE language model in about two minutes",
        "Train a byte-level Mixture-of-Experts transformer on the reference text that CPython ships, and compare it "
        "on held-out text with a byte-bigram model.",
        "; --resume continues from the last checkpoint",
        folder=True,
    ),
    "compile": Command(
        "compile the kernels ahead of time; needs no GPU",
        "Compile all shipped kernels into the disk cache, so that no training step waits for a compilation. Needs no "
        "GPU. CPU type and package versions must be those of the machine that will run the kernels.",
        "; kernels already compiled stay in the cache",
    ),
    "tune": Command(
        "find the fastest tiles for a model on this GPU",
        "Measure every tile configuration of an expert MLP's products on this GPU, and save the fastest in the cache "
        "directory for later processes. Compiles kernels that are not cached.",
        "; completed measurements are saved",
    ),
    "verify": Command(
        "check the kernels on this machine's GPU",
        "Check the built-in fusion rules on this machine's GPU against plain PyTorch, and print a table. The rules for "
        "Blackwell are off until this has passed. Compiles kernels that are not cached.",
        "; rules for Blackwell are off until it has passed",
        folder=True,
    ),
    "explain": Command(
        "plan a model's experts for a GPU; needs no GPU",
        "Plan the experts of a model for a GPU from the model's configuration: the kernel of each step, forward and "
        "backward, the memory kept for the backward pass, and the reasons why steps are not fused. Runs no step and "
        "downloads nothing.",
    ),
    "bench": Command(
        "compare an MoE layer of your sizes with the same layer in plain torch",
        "Measure time and memory of one MoE layer with its router, forward and forward + backward. Compares it with "
        "the same layer in plain torch, on a GPU also compiled. On a CPU, choose small sizes.",
        folder=True,
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the remedy."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists the options\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error that names the unknown arguments and the option nearest to the first."""
        message = f"unknown {'option' if unknown[0].startswith('-') else 'argument'} {' '.join(unknown)}"
        close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
        self.error(message + (f" (did you mean {close[0]}?)" if close else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. The default of ``argv`` is the arguments of this process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:  # before the subcommand runs, while it is imported
        return _interrupted("fusedmoe")
    except BrokenPipeError:  # the reader of the output has exited, as in `fusedmoe demo | head`
        _silence_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _silence_output()
        print("fusedmoe: error: the disk that the output goes to is full; free some space", file=sys.stderr)
        return 1


def _interrupted(program: str, note: str = "") -> int:
    print(f"{program}: interrupted{note}", file=sys.stderr)
    return 128 + signal.SIGINT


def _silence_output() -> None:
    """Discard the unwritten output: the interpreter flushes it again at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    parser = Parser(
        prog="fusedmoe",
        description="Fused kernels for training Mixture-of-Experts models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fusedmoe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers: dict[str, Parser] = {
        name: commands.add_parser(name, help=command.help, description=command.description, allow_abbrev=False)
        for name, command in COMMANDS.items()
    }
    if arguments and arguments[0] in parsers:
        return _run(arguments[0], parsers[arguments[0]], arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else f": expected one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command {arguments[0]}{hint}")
    _, unknown = parser.parse_known_args(arguments)  # ends here with --help, --version, or an error
    return parser.refuse(unknown or arguments)


def _run(name: str, parser: Parser, arguments: list[str]) -> int:
    """Parse the arguments of a subcommand and run it."""
    if COMMANDS[name].folder:
        module = importlib.import_module(f"fusedmoe.commands.{name}.command")  # for cost: imports one subcommand
    else:
        module = importlib.import_module(f"fusedmoe.commands.{name}")  # for cost, too
    make_options = getattr(module, f"{name.capitalize()}Options", None)
    if make_options is None:
        module.add_arguments(parser)
    else:
        add_arguments(parser, make_options)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(unknown)
    try:
        status: int = module.run((make_options or argparse.Namespace)(**vars(namespace)))
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return _interrupted(parser.prog, COMMANDS[name].interrupted)
    return status
