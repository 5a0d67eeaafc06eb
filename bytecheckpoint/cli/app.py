# SPDX-License-Identifier: Apache-2.0
"""The group of all commands, and the handling of their errors."""

from __future__ import annotations

import signal
import sys
import warnings
from importlib import import_module
from typing import Any

import click

from bytecheckpoint import __version__
from bytecheckpoint.cli.options import Failure
from bytecheckpoint.cli.text import one_line
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.near_names import did_you_mean

__all__ = ["bcp", "run"]

# Each command is the object `command` in the module of its name.
_COMMANDS = (
    *("convert", "copy", "diff", "digest", "doctor", "drain", "du", "holder", "info", "ls", "pin", "prune"),
    *("report", "show", "steps", "sweep", "top", "verify", "why"),
)
# Commands of earlier versions, and what does the same.
_GONE = {
    "extract": "bcp convert SOURCE TARGET --model-only",
    "merge": "bcp convert STEP TARGET --to torch, or with --model-only for safetensors",
    "rename": "bcp convert SOURCE TARGET --to bcp --rename PATTERN=NAME",
}

_WHOLE = 1000  # letters: more than any summary has


class _Interrupted(Failure):
    exit_code = 130


def _show_warning(message: Warning | str, *others: Any) -> None:
    click.echo(f"bcp: warning: {one_line(str(message).removeprefix('bytecheckpoint: '))}", err=True)


class _Commands(click.Group):
    """Imports a command when it is asked for, and turns errors of use or of a checkpoint into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"bytecheckpoint.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: command for name in _COMMANDS if (command := self.get_command(ctx, name)) is not None}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_WHOLE)) for name, each in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _GONE:
            ctx.fail(f"There is no bcp {args[0]} any more: use {_GONE[args[0]]}")
        near = did_you_mean(args[0], _COMMANDS) if args[0] not in _COMMANDS else ""
        if near and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'{near}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]  # it is called by position
                return super().invoke(ctx)
        except click.UsageError as error:
            where = error.ctx.command_path if error.ctx is not None else "bcp"
            said = error.format_message()
            raise Failure(f"{said}{'' if said.endswith(('.', '?')) else '.'} See {where} --help") from None
        except KeyboardInterrupt:
            raise _Interrupted("interrupted") from None
        except ImportError as error:
            raise Failure(f"this command needs a package that cannot be imported: {error}") from None
        except RecursionError:
            raise Failure("an object in the checkpoint is nested too deeply") from None
        except (CheckpointError, OSError, MemoryError) as error:
            raise Failure(str(error) or type(error).__name__) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, and nothing found; 1 findings or differences; 2 it could not be done, the reason is on "
    "stderr; 130 interrupted.",
)
@click.version_option(__version__, prog_name="bcp", message="%(prog)s %(version)s")
def bcp() -> None:
    """Inspects, converts and keeps checkpoints of bytecheckpoint, stock DCP and others.

    No command changes a checkpoint in place or runs its code. Two remove something: prune whole checkpoints, and sweep
    what saves that died have left in an object store.

    \b
    Example:
      bcp ls ckpt 'model.*'
    """


def run() -> int:
    """Runs the command of ``sys.argv``."""
    # If the reader of a pipe has gone, the process ends quietly, as other tools do.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack a character
    try:
        code = bcp.main(prog_name="bcp", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    return code if isinstance(code, int) else 0
