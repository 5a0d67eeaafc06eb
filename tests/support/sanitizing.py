# SPDX-License-Identifier: Apache-2.0
"""Whether these tests run under AddressSanitizer, as ``make sanitize-python`` runs them.

Tests that cannot run so are marked ``not_under_asan(reason)``.
"""

from __future__ import annotations

import os

__all__ = ["IS_UNDER_ASAN"]

IS_UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")
