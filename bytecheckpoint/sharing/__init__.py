# SPDX-License-Identifier: Apache-2.0
"""Loads in which each byte is read by one rank and sent to the others."""
