# SPDX-License-Identifier: Apache-2.0
"""Functions of processes that run as a user without privileges, so that permissions and quotas apply to them."""

from __future__ import annotations

import os

from support.saves import Attempt, SaveRequest, save, save_twice

__all__ = ["NOBODY", "as_nobody", "save_as_nobody", "save_twice_as_nobody"]

NOBODY = 65534


def as_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert os.geteuid() != 0


def save_as_nobody(request: SaveRequest) -> Attempt:
    as_nobody()
    return save(request)


def save_twice_as_nobody(address: bytes, first: SaveRequest, then: SaveRequest) -> Attempt:
    as_nobody()
    return save_twice(address, first, then)
