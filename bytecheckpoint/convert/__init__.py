# SPDX-License-Identifier: Apache-2.0
"""Conversions: a checkpoint of any format into another one, streamed, resumable and verified."""

from __future__ import annotations

from bytecheckpoint.convert.conversion import ConvertReport, convert

__all__ = ["ConvertReport", "convert"]
