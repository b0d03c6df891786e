"""The image's health check: `healthy PORT [CERTIFICATE]` exits 0 if /health answers 200 there.

The standard library only, in isolated mode: it runs every few seconds, for months.
"""

from __future__ import annotations

import http.client
import ssl
import sys


def healthy(port: int, tls: bool) -> bool:
    """Ask this container's own server; any fault means no."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    if tls:  # to ourselves, under whatever name the certificate has
        trust = ssl._create_unverified_context()
        asked = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=trust)
    try:
        asked.request("GET", "/health")
        return asked.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


if __name__ == "__main__":
    sys.exit(0 if healthy(int(sys.argv[1]), bool("".join(sys.argv[2:]))) else 1)
