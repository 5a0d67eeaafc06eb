# SPDX-License-Identifier: Apache-2.0
"""Imports in advance what the ranks import that use our torchtitan manager."""

from support.titan import on_cpu

on_cpu()

import torchtitan.trainer  # noqa: E402, F401

import bytecheckpoint.torchtitan  # noqa: E402, F401
