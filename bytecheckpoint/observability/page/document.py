# SPDX-License-Identifier: Apache-2.0
"""Puts the page together: one HTML file that holds its data, its style, its script and plotly, and asks for nothing.

Everything of the journal is in one compressed block of base64, in which no HTML can stand. The page's policy lets only
the two scripts run whose hashes it names, and no request leave, whatever a host, a path or a key is called.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import UnsupportedError

__all__ = ["page_of"]

_SCRIPTS = ("decode.js", "charts.js", "rank_charts.js", "page.js")


def page_of(contents: dict[str, Any]) -> str:
    """Returns the page.

    Args:
        contents: What ``page_contents`` returns.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    sources = files("bytecheckpoint.observability.page")
    script = '"use strict";\n' + "\n".join((sources / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    plotly = _plotly()
    policy = (
        f"default-src 'none'; script-src {_hash_of(script.encode())} {_hash_of(plotly)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(contents, allow_nan=False, separators=(",", ":")).encode()
    parts = {
        "policy": policy,
        "style": (sources / "page.css").read_text(encoding="utf-8"),
        "data": _packed(data),
        "plotly": _packed(plotly),
        "script": script,
    }
    page = (sources / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        before, mark, after = page.partition(f"{{{{{name}}}}}")
        assert mark, name
        page = before + text + after
    return page


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def _hash_of(script: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def _plotly() -> bytes:
    """Returns the script of plotly, without importing plotly, which takes longer than the page."""
    found = importlib.util.find_spec("plotly")
    for folder in found.submodule_search_locations or () if found is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.exists():
            return path.read_bytes()
    raise UnsupportedError("the page needs plotly, which is not installed: pip install 'bytecheckpoint-dcp[report]'")
