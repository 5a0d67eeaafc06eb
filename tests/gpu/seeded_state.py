# SPDX-License-Identifier: Apache-2.0
"""A state on a device that tests and their scripts both know: large, small and strided tensors, by a seed."""

from __future__ import annotations

import os

import torch

from bytecheckpoint import load_state_dict

__all__ = ["check", "made"]


def made(seed: int, large_bytes: int = 64 << 20) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {f"small{number}": torch.rand(1 + number * 100, device="cuda") for number in range(300)}
    state["large"] = torch.rand(large_bytes // 4, device="cuda")
    state["turned"] = torch.rand(3000, 200, device="cuda").t()
    return state


def check(path: str | os.PathLike[str], seed: int, large_bytes: int = 64 << 20) -> None:
    """Loads the state to the host and to the device, and compares it with what was made."""
    wanted = made(seed, large_bytes)
    for device in ("cpu", "cuda"):
        got = {key: torch.zeros_like(tensor, device=device) for key, tensor in wanted.items()}
        load_state_dict(path, got, no_dist=True)
        for key, tensor in wanted.items():
            assert torch.equal(got[key].cpu(), tensor.cpu()), key
