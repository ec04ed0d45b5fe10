"""Checks of the documentation: named files and commands exist, every folder is named, and paragraphs are short."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from canvasrt.cli.app import COMMANDS, parsed_command

ROOT = Path(__file__).parent.parent
TOP = ("bench", "build", "canvasrt", "containers", "docs", "export", "runtime", "tests")
DESIGN = ROOT / "docs" / "design.md"
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(TOP)})/[\w./*-]+")
_WORDS = 80  # the limit of a paragraph
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |#))")


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def paragraphs(page: Path) -> list[str]:
    """Return the paragraphs and list items of a page, without code and tables."""
    text = re.sub(r"^\|.*$", "", _FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return [part.strip() for part in _BREAK.split(text) if part.strip()]


def commands(page: Path) -> list[str]:
    """Return every command in a page's code that starts with `canvasrt`."""
    text = page.read_text()
    lines: list[str] = []
    for block in _FENCE.findall(text):
        lines += block.replace("\\\n", " ").splitlines()
    lines += _CODE.findall(_FENCE.sub("", text))
    stripped = (line.strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in lines)
    return [line for line in stripped if re.match(r"canvasrt [a-z-]", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line.partition(" | ")[0].partition(" > ")[0], comments=True)[1:]
        words = [word for word in words if word != "--debug"]
        if not words or words[0] in ("--help", "-h", "--version"):
            continue
        assert words[0] in COMMANDS, line
        parameters = parsed_command(words[0]).params
        known = {"--help", "-h"}.union(*(parameter.opts for parameter in parameters))
        known = known.union(*(parameter.secondary_opts for parameter in parameters))
        for word in words[1:]:
            name = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][\w-]*", name):
                assert name in known, f"{line}: no option {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_tests_and_modules_exist(page: Path) -> None:
    """`-m MODULE` names a module of ours, and the files, test names and `-k` of pytest commands select something."""
    for line in re.findall(r"(?:python -m|pytest) [^`\n]+", page.read_text()):
        words = shlex.split(line, comments=True)
        if "-m" in words and (module := words[words.index("-m") + 1]).split(".")[0] in TOP:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), line
        if "pytest" not in words:
            continue
        places = [ROOT / word for word in words if word.startswith("tests/")]
        files = [each for place in places for each in (sorted(place.rglob("test_*.py")) or [place])]
        names = [name for each in files for name in re.findall(r"def (test_\w+)", each.read_text())]
        wanted = words[words.index("-k") + 1].split(" and ")[0] if "-k" in words else ""
        of_files = [
            place for place in places if place.suffix
        ]  # for a folder, -k may also select parameters
        assert not of_files or any(wanted in name for name in names), line


def test_the_table_of_folders_names_every_folder() -> None:
    rows = set(re.findall(r"^\| `([\w/]+)/` \| ", DESIGN.read_text(), re.MULTILINE))
    files = (path.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/__init__.py"))
    folders = {path.parent.as_posix() for path in files if not path.parts[0].endswith(".egg-info")}
    assert len(folders) > 20
    assert rows - {"containers/templates", "docs"} == folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paragraphs_are_short(page: Path) -> None:
    found = paragraphs(page)
    assert found
    for paragraph in found:
        assert len(paragraph.split()) <= _WORDS, paragraph


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_table_has_a_header(page: Path) -> None:
    """Without a header, such as after an empty line, Markdown shows rows of a table as text."""
    for table in re.findall(r"(?:^\|.*\n)+", _FENCE.sub("", page.read_text()), re.MULTILINE):
        assert re.fullmatch(r"[|:\- ]+", [*table.splitlines(), ""][1]), table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    """Every path on a page that begins with a folder of the repository exists. A pattern matches at least one file."""
    for path in _PATH.findall(page.read_text()):
        assert list(ROOT.glob(path.rstrip("/."))), f"there is no {path}"


def test_the_messages_to_look_up_exist() -> None:
    """Every message that docs/operating.md quotes is in the code, except its ellipses."""
    sources = [
        file.read_text("utf-8")
        for folder in ("build", "canvasrt", "containers", "export", "runtime")
        for file in (ROOT / folder).rglob("*.py")
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # joins strings that span several lines
    _, _, table = (ROOT / "docs" / "operating.md").read_text().partition("\n## Messages\n")
    rows = re.findall(r"^\| (.+?) \| ", table, re.MULTILINE)
    quoted = [
        part.strip() for row in rows for part in re.split("[`…]", "…".join(_CODE.findall(row)))
    ]
    quoted = [part for part in quoted if part]
    assert len(quoted) > 5
    assert [part for part in quoted if part not in code] == []
