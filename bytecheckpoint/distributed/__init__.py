# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call: groups, messages, collectives, signs of life, and agreement."""
