# SPDX-License-Identifier: Apache-2.0
"""How long one rank takes to plan a save and a load of 20,000 tensors, in CPU time: other processes hardly change it.

To compare two builds, start it in turns in a checkout of each: the least of the rounds of each is the figure.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, save_state_dict


def plan(planner: Any, state: dict[str, Any], metadata: Metadata | None) -> float:
    """Returns the milliseconds of CPU time that a local plan takes."""
    begin = time.process_time_ns()
    planner.set_up_planner(state, metadata, True)
    planner.create_local_plan()
    return (time.process_time_ns() - begin) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    state = {f"layers.{i}.weight": torch.zeros(16) for i in range(args.tensors)}
    with tempfile.TemporaryDirectory() as folder:
        save_state_dict(folder, state)
        metadata = BcpReader(folder).read_metadata()
        saves, loads = [], []
        for _ in range(args.rounds):
            saves.append(plan(BcpSavePlanner(enable_plan_caching=False), state, None))
            loads.append(plan(BcpLoadPlanner(), state, metadata))
    print(f"{args.tensors:,} tensors: plan of a save {min(saves):.1f} ms, plan of a load {min(loads):.1f} ms")


if __name__ == "__main__":
    main()
