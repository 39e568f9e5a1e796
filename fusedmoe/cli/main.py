"""The command line.

- ``fusedmoe demo`` trains a small model;
- ``fusedmoe doctor`` says what this machine can run;
- ``fusedmoe explain`` says what a model's experts would run on a GPU that need not be there;
- ``fusedmoe bench`` times a layer of the user's sizes;
- ``fusedmoe compile`` builds the kernels ahead of time;
- ``fusedmoe tune`` measures which tiles are best for a model.

Each subcommand imports what it needs when it is called. Exit status: 0 done, 1 something went wrong and the message
says what to do, 2 wrong options, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where to look."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists the options\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error that names the unknown arguments, and what the first was probably meant to be."""
        message = f"unknown {'option' if unknown[0].startswith('-') else 'argument'} {' '.join(unknown)}"
        close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
        self.error(message + (f" (did you mean {close[0]}?)" if close else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. Without ``argv``, the arguments of this process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:  # outside the training loop, which ends its step and saves first
        print("fusedmoe: interrupted; checkpoints already written are intact", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone, as in `fusedmoe demo | head`
        _silence_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _silence_output()
        print("fusedmoe: error: the disk that the output goes to is full; free some space", file=sys.stderr)
        return 1


def _silence_output() -> None:
    """Send what is still unwritten nowhere: the interpreter flushes it once more at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["doctor"]:
        from fusedmoe.cli import doctor

        return doctor.main(arguments[1:])
    parser = Parser(
        prog="fusedmoe",
        description="Fused kernels for training Mixture-of-Experts models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fusedmoe {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("doctor", help="say what this machine has, which kernels it can run, and why not the others")
    demo = commands.add_parser(
        "demo",
        help="train a byte-level MoE language model in about two minutes",
        description="Train a byte-level Mixture-of-Experts transformer on the reference text that every Python ships, "
        "and compare it on held-out text with a byte-bigram model; or train one under each of several numeric recipes, "
        "and compare those.",
        allow_abbrev=False,
    )
    compile_ = commands.add_parser(
        "compile",
        help="build the kernels ahead of time; needs no GPU",
        description="Build every kernel that fusedmoe ships into the cache on disk, so that no training step waits for "
        "one. Needs no GPU, but the kind of CPU and the package versions of the machine that will use them.",
        allow_abbrev=False,
    )
    tune = commands.add_parser(
        "tune",
        help="measure which tiles are best for a model on this GPU",
        description="Measure every configuration that the products of an expert MLP can have on this GPU, and keep the "
        "fastest in the cache directory, where later processes find them. Compiles what is not compiled yet.",
        allow_abbrev=False,
    )
    explain = commands.add_parser(
        "explain",
        help="say what a model's experts would run on a GPU; needs no GPU",
        description="Plan the experts of a model for a GPU that need not be there, from the model's configuration: "
        "which kernels run each step, forward and backward; what is kept for the backward pass; why a step is not "
        "fused. Runs nothing and downloads nothing.",
        allow_abbrev=False,
    )
    bench = commands.add_parser(
        "bench",
        help="time an MoE layer of your sizes against plain torch and other libraries that are installed",
        description="Measure one MoE layer, tokens to tokens with its router, forward and forward + backward: time, "
        "spread and memory. Beside it, the same layer in plain torch, compiled where there is a GPU, and in SonicMoE "
        "and QuACK where they are installed. Runs on a CPU too; choose small sizes there.",
        allow_abbrev=False,
    )
    if arguments[:1] == ["demo"]:
        return _demo(demo, arguments[1:])
    if arguments[:1] == ["bench"]:
        return _bench(bench, arguments[1:])
    if arguments[:1] == ["explain"]:
        return _explain(explain, arguments[1:])
    if arguments[:1] == ["compile"]:
        return _compile(compile_, arguments[1:])
    if arguments[:1] == ["tune"]:
        return _tune(tune, arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], commands.choices, n=1)
        hint = f" (did you mean {close[0]}?)" if close else f": expected one of {', '.join(commands.choices)}"
        parser.error(f"unknown command {arguments[0]}{hint}")
    _, unknown = parser.parse_known_args(arguments)  # ends here with --help, --version, or an error
    return parser.refuse(unknown or arguments)


def _demo(parser: Parser, arguments: list[str]) -> int:
    from fusedmoe.demo import options
    from fusedmoe.demo.errors import DemoError

    options.add_arguments(parser)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(unknown)
    try:
        given, call = options.split_namespace(namespace)

        if call.compare is not None:
            from fusedmoe.demo.compare import compare

            return compare(given, call)
        from fusedmoe.demo.run import run

        return run(given, call)
    except DemoError as error:
        sys.stdout.flush()
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code


def _compile(parser: Parser, arguments: list[str]) -> int:
    from fusedmoe.cli import compile as command

    return _run(parser, arguments, command, command.CompileOptions, "; the kernels built so far stay in the cache")


def _tune(parser: Parser, arguments: list[str]) -> int:
    from fusedmoe.cli import tune as command

    return _run(parser, arguments, command, command.TuneOptions, "; the products measured so far are kept")


def _bench(parser: Parser, arguments: list[str]) -> int:
    from fusedmoe.cli import bench as command

    return _run(parser, arguments, command, command.BenchOptions)


def _explain(parser: Parser, arguments: list[str]) -> int:
    from fusedmoe.cli import explain as command

    return _run(parser, arguments, command, command.ExplainOptions)


class _Command(Protocol):
    """The module of a subcommand."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: Any) -> int: ...


def _run(
    parser: Parser, arguments: list[str], command: _Command, options: Callable[..., Any], interrupted: str = ""
) -> int:
    """Parse the arguments into the options of a subcommand and run it; ``interrupted`` is said after a Ctrl-C."""
    from fusedmoe.errors import InputError

    command.add_arguments(parser)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(unknown)
    try:
        return command.run(options(**vars(namespace)))
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{interrupted}", file=sys.stderr)
        return 128 + signal.SIGINT


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("fusedmoe")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
