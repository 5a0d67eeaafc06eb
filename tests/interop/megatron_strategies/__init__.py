# SPDX-License-Identifier: Apache-2.0
"""What ``test_megatron_strategies.py`` runs in environments that have megatron-core."""
