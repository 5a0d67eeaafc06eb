# SPDX-License-Identifier: Apache-2.0
"""Differences between versions of torch, private names of torch, and look-ups in the frames of DCP."""
