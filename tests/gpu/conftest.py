# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

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
