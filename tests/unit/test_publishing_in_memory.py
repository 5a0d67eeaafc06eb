# SPDX-License-Identifier: Apache-2.0
"""Versions go from one process to another by the memory of the machine."""

from __future__ import annotations

import pytest
import torch
from support.memory_runs import tiers

from bytecheckpoint import Publisher, Subscriber, Tiers
from bytecheckpoint.storage.folders import folder_at

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")

__all__ = ["tiers"]


def test_the_memory_of_tiers_is_a_place(tiers: Tiers) -> None:
    publisher = Publisher(tiers, base_every=3, keep_versions=2, no_dist=True)
    subscriber = Subscriber(tiers, no_dist=True)
    state, got = {"w": torch.zeros(10_000)}, {"w": torch.ones(10_000)}
    for version in range(1, 9):
        state["w"][version] = version
        report = publisher.publish(state, version)
        assert report.saves[0].path.startswith("held://")
        assert subscriber.update(got) == version
        assert torch.equal(got["w"], state["w"])
    subscriber.close()
    place = str(tiers.places[0])
    names = sorted(name for name in folder_at(place).folders() if folder_at(f"{place}/{name}").has(".metadata"))
    assert names == ["base-000000000007", "delta-000000000007", "delta-000000000008"]
