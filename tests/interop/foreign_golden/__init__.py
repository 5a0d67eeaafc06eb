# SPDX-License-Identifier: Apache-2.0
"""Makers of golden checkpoints of other frameworks, one module per framework. CI does not run them.

Each module says in its docstring which packages it needs, pinned, and how it is run. The commands are all alike: make
an environment, run the module from ``tests`` with a folder, and pack what it wrote::

    cd tests
    /tmp/env/bin/python -m interop.foreign_golden.megatron /tmp/made
    python support/goldens.py interop/golden/megatron-0.16.1.tar.xz /tmp/made

Nothing here imports bytecheckpoint. Beside each checkpoint lie the values to expect of it, taken from the tensors that
were saved and not from the checkpoint, but for the parameters of DeepSpeed: ``expected.pt``, which
``torch.load(weights_only=True)`` reads, has a flat dict of full tensors by name, and ``expected.json`` what is no
tensor. No file may name the machine that wrote it, so ranks run in the folder that they write, use relative paths, and
``check_names`` looks through all that was written.
"""
