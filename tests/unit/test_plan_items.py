# SPDX-License-Identifier: Apache-2.0
"""Tests objects that stay in their process while their handle is sent to others."""

from __future__ import annotations

import pickle

import pytest

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.planning.handles import handle_of, object_of
from bytecheckpoint.planning.plan_items import PlanItems


class Kept:
    pass


def test_what_stayed_is_found_by_its_handle_for_as_long_as_somebody_holds_it() -> None:
    kept = Kept()
    handle = pickle.loads(pickle.dumps(handle_of(kept)))
    assert object_of(handle) is kept
    del kept
    assert object_of(handle) is None


def test_nothing_is_at_home_in_another_process() -> None:
    kept = Kept()
    _, number = handle_of(kept)
    assert object_of(("another process", number)) is None


class Source:
    num_items = 7

    def items(self) -> list[object]:
        return [object()] * self.num_items


def test_items_whose_owner_is_gone_have_a_number_and_say_where_they_stayed() -> None:
    items: PlanItems[object] = PlanItems(Source())
    items.send_handle()
    sent = pickle.dumps(items)
    assert pickle.loads(sent) is items
    del items
    gone = pickle.loads(sent)
    assert len(gone) == 7
    with pytest.raises(CheckpointError, match="stayed on the rank"):
        list(gone)
