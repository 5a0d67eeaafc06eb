# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of pages that are made of the code: the fields of ``Config``, and the names of the API.

Each stands between two comments of HTML, so that it is in the file, where people read it on GitHub and in an editor.
``python docs/extensions/made_tables.py`` brings all of them up to date; a test fails until somebody does.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # the package of this checkout, whatever is installed
    sys.path.insert(0, str(DOCS.parent))

from config_rows import config_rows  # noqa: E402

__all__ = ["PAGES", "with_tables"]

PAGES = ("configuration.md", "api.md")

_BEGIN, _END = "<!-- made by docs/extensions/made_tables.py -->", "<!-- end of what was made -->"
_MADE = re.compile(rf"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}\n", re.DOTALL)
_BLOCK = re.compile(r"```\{eval-rst\}\n(.*?)```\n", re.DOTALL)
_DIRECTIVE = re.compile(r"^\.\. auto(class|function|data|module):: (\S+)$", re.MULTILINE)
_MOST_PARAMETERS = 4


def with_tables(page: str, text: str) -> str:
    """Returns the text of a page with its tables up to date.

    Args:
        page: Name of the page, one of ``PAGES``.
        text: Its text. In configuration.md the comments must stand where the table goes; in api.md a table goes before
            each block of directives.
    """
    if page == "configuration.md":
        return _MADE.sub(lambda _: _between(_config_table()), text)
    plain = re.sub(rf"{_MADE.pattern}\n", "", text, flags=re.DOTALL)
    return _BLOCK.sub(lambda block: f"{_between(_table_of_names(block[1]))}\n{block[0]}", plain)


def _between(lines: Iterator[str]) -> str:
    return "\n".join([_BEGIN, "", *lines, "", _END, ""])


def _config_table() -> Iterator[str]:
    yield "| field | default | what it does |"
    yield "| --- | --- | --- |"
    for name, default, description in config_rows():
        yield f"| `{name}` | `{default}` | {_markdown(description)} |"


def _table_of_names(directives: str) -> Iterator[str]:
    yield "| name | what it is |"
    yield "| --- | --- |"
    for kind, name in _DIRECTIVE.findall(directives):
        if kind == "module":
            module = importlib.import_module(name)
            for each in module.__all__:
                yield _row(each, getattr(module, each))
        else:
            yield _row(name, _found(name))


def _found(name: str) -> Any:
    """Returns what a name of api.md means: a name of the package, or one with its module in front."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module or "bytecheckpoint"), last)


def _row(name: str, value: Any) -> str:
    text = inspect.getdoc(value) if callable(value) else "The version of the package."
    return f"| `{name}{_parameters(value)}` | {_markdown((text or '').partition(chr(10))[0])} |"


def _parameters(value: Any) -> str:
    """Returns the parameters that a call must have; nothing of errors, and of what only the package makes."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
        return ""
    parameters = inspect.signature(value).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    by_name = [each.name for each in parameters if each.default is each.empty and each.kind == each.KEYWORD_ONLY]
    if len(needed) + len(by_name) > _MOST_PARAMETERS:
        return ""
    listed = [*needed, *(f"{each}=" for each in by_name)]
    return f"({', '.join([*listed, *['...'] * (len(listed) < len(parameters))])})"


def _markdown(text: str) -> str:
    """Returns a line of reStructuredText as Markdown in a cell."""
    return text.replace("``", "`").replace("|", "\\|")


def main() -> None:
    """Brings the tables of all pages up to date."""
    for page in PAGES:
        path = DOCS / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
