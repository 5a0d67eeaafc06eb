# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the memory of a machine: a small process holds them, and outlives those that train. No torch."""
