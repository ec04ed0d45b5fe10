"""Which arguments are taken for addresses of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from canvasrt.cli.options import as_url, is_url


@pytest.mark.parametrize(
    ("subject", "url"),
    [
        ("localhost:8765", "http://localhost:8765"),
        ("[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("https://a.example", "https://a.example"),
        ("engines", None),
        ("out/engines:2", None),
        ("there:1", None),
    ],
)
def test_an_address_may_leave_out_its_scheme(
    subject: str, url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there:1").mkdir()  # a folder of this name is a bundle, not an address
    assert (as_url(subject) if is_url(subject) else None) == url
