# SPDX-License-Identifier: Apache-2.0
"""The states of random number generators, as plain values that can be saved."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from bytecheckpoint.errors import ConfigError

__all__ = ["get_rng_state", "set_rng_state"]


def get_rng_state() -> dict[str, Any]:
    """Returns the states of the random number generators of Python, torch, its CUDA devices, and numpy if imported.

    The result is plain data and tensors, for ``per_rank`` or ``extra_state``: ``{"rng": get_rng_state()}``. It belongs
    to one rank (policy ``own``), so another number of ranks starts with generators of its own.
    """
    import sys

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss))
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets the random number generators to a state that ``get_rng_state`` returned.

    Args:
        state: What ``get_rng_state`` returned. States of CUDA devices beyond those of this process are ignored.

    Raises:
        ConfigError: ``state`` has another form.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"set_rng_state: the state is not one that get_rng_state gave: {type(error).__name__}: {error}"
        ) from error
