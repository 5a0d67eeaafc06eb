# SPDX-License-Identifier: Apache-2.0
"""The end of a process waits for tensors that other threads still hold, and not for ever."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from bytecheckpoint.distributed.lent_tensors import lend

SCRIPT = """
import sys, threading, time
import torch
from bytecheckpoint.distributed.lent_tensors import lend

def hold(seconds):
    held = lend(torch.zeros(3))
    is_held.set()
    time.sleep(seconds)
    print("has let go")

is_held = threading.Event()
threading.Thread(target=hold, args=(float(sys.argv[1]),), daemon=True).start()
is_held.wait()
"""


def _run(held_s: float) -> tuple[str, float]:
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(held_s)], capture_output=True, text=True, check=True)
    return ended.stdout, time.monotonic() - begin


def test_what_is_lent_shares_the_memory() -> None:
    tensor = torch.zeros(3)
    lent = lend(tensor)
    assert lent is not tensor
    lent.fill_(2)
    assert tensor.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("held_s", "said"), [(0.3, "has let go\n"), (600, "")], ids=["soon", "never"])
def test_a_process_ends_behind_them(held_s: float, said: str) -> None:
    output, took_s = _run(held_s)
    assert output == said
    assert took_s < 60
