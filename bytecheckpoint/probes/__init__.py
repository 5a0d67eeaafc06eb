# SPDX-License-Identifier: Apache-2.0
"""What the package relies on in torch, torchtitan and OLMo-core, stated once each, and looked at before it is used."""
