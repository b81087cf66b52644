"""The commands together, and what becomes of their failures.

Nothing here or in the commands' modules imports torch before a command runs, so that `--help` and
a mistyped option answer at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from mtplx import __version__
from mtplx.cli import audit, bench, chat, generate, inspect, train
from mtplx.errors import MtplxError, MtplxWarning

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def fail(message: str) -> NoReturn:
    """End with one line on stderr."""
    print(f"mtplx: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(FAILED)


@contextmanager
def reported() -> Iterator[None]:
    """Turn what a user can cause into an exit code and at most one line."""
    try:
        yield
        sys.stdout.flush()  # a closed pipe shows here at the latest
    except MtplxError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch's allocators raise RuntimeErrors, each with words of its own.
        text = str(error)
        if isinstance(error, RuntimeError) and not (
            "out of memory" in text or "can't allocate memory" in text
        ):
            raise
        fail("out of memory: use a smaller model, a shorter context or --dtype bfloat16")


class Commands(TyperGroup):
    """The group of commands, run under `reported`."""

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("inspect")(inspect.inspect)
app.command("train")(train.train)
app.command("audit")(audit.audit)
app.command("bench")(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mtplx {__version__}")
        raise typer.Exit()


def _note(message: Warning | str, *others: object, **more: object) -> None:
    """A warning as a line for the user."""
    print(f"note: {message}", file=sys.stderr)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Several tokens per forward pass, exactly the model's own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and exit: 0, 1 after a failure, 2 after wrong usage, 130 on Ctrl-C."""
    # Libraries report to developers on stderr; what matters to the user arrives as an exception.
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("always", category=MtplxWarning)
    warnings.showwarning = _note
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A shell may have closed any of the three.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character
    app(args=None if argv is None else list(argv), prog_name="mtplx")
