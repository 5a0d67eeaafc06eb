# SPDX-License-Identifier: Apache-2.0
"""Tensors of which a rank holds some boxes, and exact comparison of values."""
