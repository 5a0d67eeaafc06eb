#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Orbax joins keys by dots and then restores one array under two keys.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2.
#
# Expected: {"a.b": ones, "a": {"b": zeros}} is restored as it was, or refused when it is saved, as DCP does with such
# a pair ("duplicated key").
#
# Seen: it is saved and restored without an error, and both keys hold the zeros. Their arrays are stored under the one
# name "a.b", and the second overwrote the first. A slash instead of the dot is kept apart.
#
# Who is hurt: whoever puts flat state dicts of PyTorch ("layers.0.weight") beside nested ones in one tree, such as a
# converted model beside the optimizer's tree.
#
# Way round: nest all keys, or replace dots before saving.
set -euo pipefail
name=orbax_dotted_keys_collide
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8

cat > trial.py <<'PY'
import logging
import os

import jax.numpy as jnp
import orbax.checkpoint as ocp

logging.disable(logging.CRITICAL)
for sign in (".", "/"):
    tree = {f"a{sign}b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    path = os.path.abspath(f"checkpoint_{ord(sign)}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(path)
    for title, values in (("saved", tree), ("restored", loaded)):
        flat, nested = values[f"a{sign}b"], values["a"]["b"]
        print(f"{title}: a{sign}b {flat.tolist()}, a then b {nested.tolist()}")
PY
cat > stated <<'TXT'
saved: a.b [1.0, 1.0], a then b [0.0, 0.0]
restored: a.b [0.0, 0.0], a then b [0.0, 0.0]
saved: a/b [1.0, 1.0], a then b [0.0, 0.0]
restored: a/b [1.0, 1.0], a then b [0.0, 0.0]
TXT

if ! venv/bin/python -W ignore trial.py > seen 2> stderr; then
  cat seen stderr >&2
  echo "$name: the trial itself failed" >&2
  exit 1
fi
cat seen
if ! diff -u stated seen >&2; then
  echo "$name: the behaviour is no longer as stated" >&2
  exit 1
fi
echo "$name: as stated"
