# SPDX-License-Identifier: Apache-2.0
"""Weights that ranks publish while they train, and others take over while they serve."""
