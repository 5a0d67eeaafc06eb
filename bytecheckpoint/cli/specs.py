# SPDX-License-Identifier: Apache-2.0
"""Options that describe what to take of a checkpoint, under which names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from bytecheckpoint.cli.options import Failure
from bytecheckpoint.load_spec.spec import LoadSpec

__all__ = ["spec_of", "spec_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def spec_options(function: _Function) -> _Function:
    """Adds the options ``--spec``, ``--include``, ``--exclude`` and ``--rename``, which ``spec_of`` takes."""
    for option in (
        click.option(
            "--rename", multiple=True, metavar="PATTERN=NAME", help="New names, as in a LoadSpec; repeatable."
        ),
        click.option("--exclude", multiple=True, metavar="PATTERN", help="Keys to leave out; may be repeated."),
        click.option(
            "--include", multiple=True, metavar="PATTERN", help="Keys to take; may be repeated. Default: all."
        ),
        click.option("--spec", "spec_file", type=click.Path(dir_okay=False), help="TOML file with a LoadSpec."),
    ):
        function = option(function)
    return function


def spec_of(
    file: str | None, include: Sequence[str] = (), exclude: Sequence[str] = (), rename: Sequence[str] = ()
) -> LoadSpec | None:
    """Returns what the options describe; None if there are none."""
    if file is not None and (include or exclude or rename):
        raise Failure("--spec: pass a file or --include, --exclude and --rename, not both")
    if file is not None:
        return LoadSpec.from_file(file)
    rules = _rules_of(rename)
    return LoadSpec(include=include, exclude=exclude, rename=rules) if include or exclude or rules else None


def _rules_of(texts: Sequence[str]) -> dict[str, str]:
    """Returns rules ``PATTERN=NAME`` as ``LoadSpec`` takes them."""
    rules = {}
    for text in texts:
        pattern, equals, name = text.partition("=")
        if not equals:
            raise Failure(f"--rename {text}: must be PATTERN=NAME")
        rules[pattern] = name
    return rules
