"""The health check of a container: `python -m canvasrt.containers.image.probe` exits 0 once it is ready.

It asks the port that NIM's variables name; nothing but the standard library is imported, to be quick.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

_PATH = "/v1/health/ready"
_TIMEOUT = 4.0


def main(environment: Mapping[str, str] = os.environ) -> int:
    """0 when the server answers that it is ready, else 1."""
    host = "127.0.0.1"
    health = environment.get("NIM_HEALTH_PORT", "").strip()
    port = int(health or environment.get("NIM_SERVER_PORT", "").strip() or 8000)
    mode = environment.get("NIM_SSL_MODE", "").strip().lower()
    connection: http.client.HTTPConnection
    if mode in ("tls", "mtls") and not health:  # the port for health alone has no TLS
        connection = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT, context=_context(environment, mode)
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request("GET", _PATH)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"{host}:{port}: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print(status)
    return 0 if status == 200 else 1


def _context(environment: Mapping[str, str], mode: str) -> ssl.SSLContext:
    """The certificate is for another name than the loopback address, and it is our own server."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if mode == "mtls":  # the server's own pair is signed by the authority that it asks for
        context.load_cert_chain(environment["NIM_SSL_CERTS_PATH"], environment["NIM_SSL_KEY_PATH"])
    return context


if __name__ == "__main__":
    sys.exit(main())
