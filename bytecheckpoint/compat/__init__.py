# SPDX-License-Identifier: Apache-2.0
"""Differences between versions of torch, and private names of torch."""
