# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the memory of a machine, which a small process holds: they outlive those that train. Needs no torch."""
