# SPDX-License-Identifier: Apache-2.0
"""What the package relies on in torch, torchtitan and OLMo-core. Each item is stated once, and checked before use."""
