"""The code in docs/python.md runs as printed. The part that calls a server is only compiled, and its imports work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.library import bundle

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_the_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    *local, remote = blocks
    shutil.copytree(bundle("demo", max_batch=4), tmp_path / "cpu")  # so that nothing is built
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in local:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
    assert capsys.readouterr().out.count("tenalp") == 2
    compile(remote, str(PAGE), "exec")
    imports = "\n".join(re.findall(r"^from .*", remote, re.M))
    exec(imports, names)  # noqa: S102
