# SPDX-License-Identifier: Apache-2.0
"""The shortest use: one process saves a model and its optimizer through bytecheckpoint, loads them and compares."""

import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from training.comparison import blank_copy, compare

from bytecheckpoint import BcpReader, BcpWriter

# The demo uses one process without a process group on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

model = torch.nn.TransformerEncoderLayer(d_model=256, nhead=8)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(10, 4, 256)).sum().backward()
optimizer.step()
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "epoch": 3}

with tempfile.TemporaryDirectory() as path:
    dcp.save(state, storage_writer=BcpWriter(path))
    loaded = blank_copy(state)
    dcp.load(loaded, storage_reader=BcpReader(path))

comparison = compare(state, loaded)
assert comparison.equal, comparison
print(f"saved and loaded: {comparison}")
