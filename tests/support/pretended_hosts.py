# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine that believe that they are on several."""

from __future__ import annotations

from bytecheckpoint.runtime import place

__all__ = ["pretend_host"]


def pretend_host(name: str) -> None:
    """Makes this process believe that it runs on the host ``name``, which no process of another host sees."""
    place._own.get()[0] = place.Place(host=name, processes=name)
