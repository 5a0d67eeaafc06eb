# SPDX-License-Identifier: Apache-2.0
"""What all parts need from their process: locks that survive a fork, quick GIL switches, Ctrl-C, SIGTERM."""
