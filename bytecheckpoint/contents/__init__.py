# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint: opened at any place, its items, their values, and objects without running their code."""
