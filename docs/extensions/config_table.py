# SPDX-License-Identifier: Apache-2.0
"""The directive ``{config-table}``: a table of all fields of ``bytecheckpoint.Config``, made from the class itself."""

from __future__ import annotations

from typing import Any

from config_rows import config_rows
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]


class ConfigTable(SphinxDirective):
    """Writes the table in reStructuredText, in which docstrings are written."""

    def run(self) -> list[nodes.Node]:
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 12 66", ""]
        lines += ["   * - Field", "     - Default", "     - What it does"]
        for name, default, description in config_rows():
            lines += [f"   * - ``{name}``", f"     - ``{default}``", f"     - {description}"]
        # The page is MyST, whose directives parse their content as MyST: `eval-rst` is its way into reStructuredText.
        content = StringList(["```{eval-rst}", *lines, "```"], source=__file__)
        table = nodes.Element()
        self.state.nested_parse(content, self.content_offset, table)
        return table.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("config-table", ConfigTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
