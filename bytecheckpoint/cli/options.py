# SPDX-License-Identifier: Apache-2.0
"""What commands have in common: options, failures and the progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any, TypeVar

import click

from bytecheckpoint.cli.text import one_line
from bytecheckpoint.storage.folders import known
from bytecheckpoint.storage.paths import location

__all__ = [
    "SHORT_DTYPES",
    "Failure",
    "bar",
    "checked_path",
    "checkpoint_argument",
    "json_option",
    "progress_option",
    "whole_dtype",
]

# How people say the dtypes that tensors are cast to.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Failure(click.ClickException):
    """An error that is shown as one line on stderr."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"bcp: {one_line(self.message)}", file=file, err=file is None)


def checked_path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Returns a path as an absolute path, or the URL of an object store; None if the user passed none."""
    return None if value is None else str(known(location(value)))


def whole_dtype(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Returns the name that torch has for a dtype which people shorten, such as bf16; any other name as it is."""
    return SHORT_DTYPES.get(value, value) if value is not None else None


def checkpoint_argument(name: str) -> Callable[[_Function], _Function]:
    """Adds an argument: the directory of a checkpoint, a step or a run, as a path or a URL."""
    return click.argument(name, type=click.STRING, callback=checked_path)


def json_option(function: _Function) -> _Function:
    """Adds the option ``--json``."""
    option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text for people.")
    return option(function)


def progress_option(function: _Function) -> _Function:
    """Adds the option ``--no-progress``."""
    return click.option(
        "--progress/--no-progress",
        "progress",
        default=True,
        help="Show a progress bar on stderr, if that is a terminal.",
    )(function)


@contextmanager
def bar(title: str, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar, if stderr is a terminal. Yields a function to call with the bytes done and the total."""
    if not progress or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    tqdm: Any = import_module("tqdm").tqdm  # imported here, because pipes do not need it
    with tqdm(desc=title, total=0, unit="B", unit_scale=True, leave=False, file=sys.stderr) as shown:

        def tell(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield tell
