# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bytecheckpoint


@pytest.fixture(scope="session", autouse=True)
def _device_is_there() -> None:
    why = ""
    if not bytecheckpoint.build_info()["cuda"]:
        why = "this build has no device code: there was no nvcc"
    elif not torch.cuda.is_available():
        why = "torch sees no CUDA device"
    if why:
        pytest.skip(f"GPU TESTS NOT RUN, {why}: THE GATHER KERNEL AND STAGING FROM A DEVICE ARE NOT TESTED")
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # opens files and starts threads that stay


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one device. Its group uses NCCL for tensors on devices, and gloo for those on the host."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()
