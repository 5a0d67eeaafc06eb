# SPDX-License-Identifier: Apache-2.0
"""The package, pyproject.toml, the newest entry of CHANGELOG.md and a tag of HEAD name the same version."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def versions(package: str, pyproject: str, changelog: str, tags: str) -> dict[str, str]:
    """Returns the version that each place names; a tag of another form than ``v1.2.3`` is none of a version."""
    found = {
        "__version__": re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0],
        "pyproject.toml": str(tomllib.loads(pyproject)["project"]["version"]),
        "CHANGELOG.md": re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0],
    }
    return found | {f"tag v{tag}": tag for tag in re.findall(r"^v(\d\S*)$", tags, re.MULTILINE)}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_versions_agree() -> None:
    # Outside a checkout of git there are no tags to compare.
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = versions(read("bytecheckpoint/__init__.py"), read("pyproject.toml"), read("CHANGELOG.md"), tags.stdout)
    assert len({*found.values()}) == 1, found


def test_a_version_that_differs_is_noticed() -> None:
    found = versions(
        '"""..."""\n__version__ = "0.2.0"\n',
        '[project]\nversion = "0.2.1"\n',
        "# Changelog\n\n## 0.2.2\n\n## 0.1.0\n",
        "v0.2.3\nreviewed\n",
    )
    assert [*found.values()] == ["0.2.0", "0.2.1", "0.2.2", "0.2.3"]
