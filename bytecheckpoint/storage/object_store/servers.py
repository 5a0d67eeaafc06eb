# SPDX-License-Identifier: Apache-2.0
"""What is known of the server of a store, for errors and ``bcp doctor``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import timedelta
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["name_in", "server_of"]

_LONGEST_S = 5.0
# Of Ceph's gateway before release 17, which has no header "Server": a number of 21 digits, the time, zone and so on.
_CEPH_REQUEST = re.compile(r"tx[0-9a-f]{21}-[0-9a-f]{10}-[0-9a-f]+-")


def server_of(store: Any) -> str:
    """Returns the name and the address of the server of a store of obstore; what is not known is said to be so.

    It makes one request, without credentials, which is given up after 5 s, and raises nothing.
    """
    import obstore

    if type(store).__name__ == "MemoryStore":
        return "obstore's store in memory"
    try:
        # Nobody else tells where requests go: variables, regions and buckets decide. What is signed is not used.
        place = urlsplit(obstore.sign(store, "GET", "x", timedelta(seconds=1)))
    except Exception:  # obstore can sign for some stores and credentials alone
        return "a server of which nothing is known"
    name = ""
    connection = (HTTPSConnection if place.scheme == "https" else HTTPConnection)(place.netloc, timeout=_LONGEST_S)
    with contextlib.suppress(OSError, HTTPException), contextlib.closing(connection):
        connection.request("GET", "/")  # SeaweedFS does not say its name to HEAD
        name = name_in(dict(connection.getresponse().headers))
    return f"{name or 'a server that does not say its name'} at {place.netloc}"


def name_in(headers: Mapping[str, str]) -> str:
    """Returns the name of a server by the headers of its reply; "" if they do not tell."""
    known = {name.lower(): value for name, value in headers.items()}
    names = [known.get("server", "")]
    if "x-openstack-request-id" in known:
        names.append("OpenStack Swift, by its X-Openstack-Request-Id")
    elif _CEPH_REQUEST.match(known.get("x-amz-request-id", "")) and "Ceph" not in names[0]:
        names.append("Ceph RGW, by its x-amz-request-id")
    return "; ".join(filter(None, names))
