"""The health check of a container: `python -m canvasrt.containers.image.probe` exits with 0 once it
is ready.

It calls the port that NIM's variables name. It imports little, since it runs often.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

from canvasrt.containers.names import API_PORT

_PATH = "/v1/health/ready"
_TIMEOUT = 4.0


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Return 0 when the server is ready, else 1."""
    host = "127.0.0.1"
    health = environment.get("NIM_HEALTH_PORT", "").strip()
    port = int(health or environment.get("NIM_SERVER_PORT", "").strip() or API_PORT)
    mode = environment.get("NIM_SSL_MODE", "").strip().lower()
    connection: http.client.HTTPConnection
    if mode in ("tls", "mtls") and not health:  # the health port has no TLS
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
    """Return a context without verification: the certificate is not for the loopback address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if mode == "mtls":  # the server's own pair is signed by the required authority
        context.load_cert_chain(environment["NIM_SSL_CERTS_PATH"], environment["NIM_SSL_KEY_PATH"])
    return context


if __name__ == "__main__":
    sys.exit(main())
