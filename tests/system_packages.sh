#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the system packages that tests use, where it may: as root on Debian and its like. Elsewhere it names those that
# are missing. The tests that need one then skip, and say so. In CI, where none may skip for that, it fails instead.
set -euo pipefail

missing=()
need() {  # PACKAGE COMMAND...: the package is missing if the command fails
  local package=$1
  shift
  "$@" > /dev/null 2>&1 || missing+=("$package")
}
need doctest-dev test -e /usr/include/doctest/doctest.h  # the C++ tests
need strace command -v strace                            # errors that are injected into system calls
need bindfs command -v bindfs                            # storage that does not answer, and other file systems
need mergerfs command -v mergerfs
need unionfs-fuse command -v unionfs
need sshfs command -v sshfs
need openssh-sftp-server test -x /usr/lib/openssh/sftp-server
need gocryptfs command -v gocryptfs
need libfuse3-dev test -e /usr/include/fuse3/fuse.h      # a file system that shows changes late
need pkg-config command -v pkg-config
need spin command -v spin                                # the models of the commit and of groups
need xfsprogs command -v mkfs.xfs                        # file systems whose power is cut
need btrfs-progs command -v mkfs.btrfs                   # limits of file systems
need iproute2 command -v ip                              # machines made of namespaces
need nftables command -v nft
need libxxhash0 sh -c "ldconfig -p | grep -q libxxhash.so.0"  # the hashes of unchanged bytes, in C++ tests
need ethtool command -v ethtool
need quota command -v setquota
need chromium command -v chromium                        # the page of bcp report

[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" && exit 0
fi
echo "*** Some tests will skip. They need: ${missing[*]} ***" >&2
[ -z "${CI:-}" ]
