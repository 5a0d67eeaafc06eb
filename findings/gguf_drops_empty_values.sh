#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# gguf writes no key for an empty text or an empty array.
#
# Versions: gguf 0.19.0, numpy 2.4.6.
#
# Expected: the format has a length for texts and arrays, so an empty one is stored and read back as empty.
#
# Seen: add_string and add_array return without an error, and the key is not in the file. A reader cannot tell "empty"
# from "never set", and whoever asks for the key fails or takes its own default.
#
# Who is hurt: converters that carry over a tokenizer or chat settings where "" has a meaning (no prefix, no template):
# the runtime then uses its default instead.
#
# Way round: check after writing that all keys are there.
set -euo pipefail
name=gguf_drops_empty_values
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check gguf==0.19.0 numpy==2.4.6

cat > trial.py <<'PY'
import gguf

writer = gguf.GGUFWriter("x.gguf", "llama")
writer.add_string("test.text", "a")
writer.add_string("test.empty_text", "")
writer.add_array("test.array", [1, 2])
writer.add_array("test.empty_array", [])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
for key, field in gguf.GGUFReader("x.gguf").fields.items():
    if key.startswith("test."):
        print(key, field.contents())
PY
cat > stated <<'TXT'
test.text a
test.array [1, 2]
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
