# SPDX-License-Identifier: Apache-2.0
"""Saves and loads live models and optimizers of DDP, FSDP1, FSDP2 and tensor parallelism under one set of names."""
