# SPDX-License-Identifier: Apache-2.0
"""Imports what ranks that use our manager for torchtitan import."""

from support.titan import on_cpu

on_cpu()

import torchtitan.trainer  # noqa: E402, F401

import bytecheckpoint.torchtitan  # noqa: E402, F401
