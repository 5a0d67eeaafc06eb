# SPDX-License-Identifier: Apache-2.0
"""Live models and optimizers of DDP, FSDP1, FSDP2 and tensor parallelism, saved and loaded under one set of names."""
