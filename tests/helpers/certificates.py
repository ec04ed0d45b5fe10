"""TLS certificates, created by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of `make_certificates`."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls_files(folder: Path) -> dict[str, str]:
    """Return the server's files as options of a front end."""
    return {"certificate": str(folder / "server.pem"), "key": str(folder / "server.key")}


def openssl(folder: Path, *arguments: str) -> None:
    """Run openssl in a folder."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path) -> Path:
    """Write an authority, `ca`, and certificates signed by it for `server` and `caller`, each as NAME.pem and NAME.key.
    The key `locked.key` needs a password."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
    for name in ("server", "caller"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(folder, "req", *key, *files, "-subj", f"/CN={name}")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    openssl(
        folder, "pkey", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"
    )
    return folder
