# SPDX-License-Identifier: Apache-2.0
"""The dtypes of the format."""

from __future__ import annotations

import torch

from bytecheckpoint.native import _core

__all__ = ["NAMES"]

NAMES = [name for name in _core.dtype_names() if hasattr(torch, name)]
"""Names of the dtypes whose elements are stored as they are, and that this torch has."""
