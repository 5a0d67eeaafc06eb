#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A file that is open and has lost its name can be read and written on mergerfs and gocryptfs, and not be opened again.
#
# Versions: mergerfs 2.33.5, gocryptfs 2.3, bindfs 1.14.7, of Debian 12. Needs root, /dev/fuse, and apt-get for download.
#
# Expected: open("/proc/self/fd/N") opens the file of descriptor N once more, whether it still has a name or not, as it
# does on ext4, xfs and tmpfs. Programs do so to get a descriptor with other flags (without O_DIRECT, or for reading
# only), and tempfile.TemporaryFile gives nameless files where there is no O_TMPFILE.
#
# Seen: while the file has its name, it can be opened again on all three. Without a name, it is ESTALE on mergerfs and
# ENOENT on gocryptfs, while the descriptor itself goes on to read and write. bindfs does what local file systems do: it
# keeps the file under a hidden name.
#
# Who is hurt: whoever changes flags of an open temporary file by opening it again, and readers that do so beside a
# writer that replaces the file.
#
# Way round: open the second descriptor while the name is there; clearing a flag by fcntl does not reach a server in
# user space.
set -euo pipefail
name=fuse_deleted_file_cannot_be_reopened
work=$(mktemp -d)
cleanup() {
  for at in mergerfs gocryptfs bindfs; do umount -l "$work/at.$at" 2> /dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT
cd "$work"

apt-get download -qq mergerfs=2.33.5-1 gocryptfs=2.3-1+b4 bindfs=1.14.7-1 libfuse2 > /dev/null 2>&1 || {
  echo "apt-get cannot download these packages of Debian 12 here" >&2
  exit 2
}
for package in *.deb; do dpkg-deb -x "$package" root; done
folder_of() { dirname "$(find "$work/root" ! -type d -name "$1" -print -quit)"; }
PATH="$(folder_of gocryptfs):$PATH"
LD_LIBRARY_PATH="$(folder_of libfuse.so.2)"
export PATH LD_LIBRARY_PATH

mkdir at.{mergerfs,gocryptfs,bindfs} of.{mergerfs,gocryptfs,bindfs}
echo "not a secret" > word
mergerfs of.mergerfs at.mergerfs
gocryptfs -q -init -scryptn 10 -passfile word of.gocryptfs
gocryptfs -q -passfile word of.gocryptfs at.gocryptfs
bindfs of.bindfs at.bindfs

cat > trial.py <<'PY'
import errno
import os
import sys
import time


def opened_again(fd):
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]


for folder in sys.argv[1:]:
    path = os.path.join(folder, "file")
    for _ in range(100):  # the mount may take a moment
        if os.path.ismount(folder):
            break
        time.sleep(0.05)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    named = opened_again(fd)
    os.unlink(path)
    nameless = opened_again(fd)
    os.pwrite(fd, b"still here", 0)
    print(os.path.basename(folder).removeprefix("at."), named, nameless, os.pread(fd, 10, 0).decode())
PY
python3 trial.py at.mergerfs at.gocryptfs at.bindfs | tee seen

cat > stated <<'TEXT'
mergerfs ok ESTALE still here
gocryptfs ok ENOENT still here
bindfs ok ok still here
TEXT
if ! diff -u stated seen >&2; then
  echo "$name: the behaviour is no longer as stated" >&2
  exit 1
fi
echo "$name: as stated"
