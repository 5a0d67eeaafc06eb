# SPDX-License-Identifier: Apache-2.0
"""Public functions and classes describe every argument; ruff looks at the form of all docstrings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import bytecheckpoint

PUBLIC = [getattr(bytecheckpoint, name) for name in bytecheckpoint.__all__]
# Made by us alone: reports, whose fields their base classes describe, and handles.
MADE_BY_US = (bytecheckpoint.SaveReport, bytecheckpoint.LoadReport, bytecheckpoint.SaveHandle)
CALLED_BY_USERS = [
    each
    for each in PUBLIC
    if callable(each)
    and each not in MADE_BY_US
    and not (isinstance(each, type) and issubclass(each, BaseException))
    and not (isinstance(each, type) and dataclasses.is_dataclass(each) and each is not bytecheckpoint.Config)
]


def undescribed(function: Callable[..., Any]) -> list[str]:
    """Returns the parameters that the docstring does not name in a section of its own."""
    text = inspect.getdoc(function) or ""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind not in kinds and f"{each.name}:" not in text]


@pytest.mark.parametrize("function", CALLED_BY_USERS, ids=lambda each: each.__name__)
def test_every_argument_is_described(function: Callable[..., Any]) -> None:
    assert undescribed(function) == []


@pytest.mark.parametrize("name", bytecheckpoint.__all__)
def test_everything_public_has_a_docstring(name: str) -> None:
    value = getattr(bytecheckpoint, name)
    if not inspect.ismodule(value) and callable(value):
        assert inspect.getdoc(value)


def test_what_is_not_described_is_found() -> None:
    def function(given: int, absent: int, *rest: int) -> None:
        """Does nothing.

        Args:
            given: A number.
        """

    assert undescribed(function) == ["absent"]
    assert len(CALLED_BY_USERS) > 20
