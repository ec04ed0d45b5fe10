"""TLS certificates that are renewed while the server runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from canvasrt.containers.openai import tls
from canvasrt.containers.openai.connections import Places
from tests.helpers.certificates import make_certificates


def test_a_renewed_certificate_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_LOOK_EVERY", 0.02)
    first = make_certificates(tmp_path)
    (tmp_path / "renewed").mkdir()
    second = make_certificates(tmp_path / "renewed")
    files = {"certificate": str(first / "server.pem"), "key": str(first / "server.key")}
    places = Places(1, tls.server_context(files))

    async def shown() -> bytes | None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=places.tls)
        port = server.sockets[0].getsockname()[1]
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        server.close()
        return found

    async def serve() -> None:
        renewing = asyncio.create_task(tls.renew(places, files))
        before = await shown()
        (second / "server.pem").replace(files["certificate"])  # its key is not there yet
        await asyncio.sleep(0.2)
        assert await shown() == before
        (second / "server.key").replace(files["key"])
        renewed = ssl.PEM_cert_to_DER_cert(Path(files["certificate"]).read_text())
        while await shown() != renewed:
            await asyncio.sleep(0.02)
        assert renewed != before
        renewing.cancel()

    asyncio.run(serve())
