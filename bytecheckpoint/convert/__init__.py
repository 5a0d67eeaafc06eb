# SPDX-License-Identifier: Apache-2.0
"""Conversions: a checkpoint of any source into files of another format, streamed, resumable and verified."""
