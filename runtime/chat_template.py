"""Renders a checkpoint's chat template. Control tokens that the template writes are distinguished from the same text in
messages."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from canvasrt.errors import CanvasError

# Marks are surrogates, which valid text cannot contain, so callers cannot forge marks.
_FIRST, _LAST = 0xD800, 0xDFFF
_MOST_CUTS = 1 << 16  # maximum number of cuts in a text; every piece is encoded separately
_HALF = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern that matches the longest of `texts` at a position. It branches by characters: a
    tokenizer can have thousands of control tokens, such as `<unused0>`, and trying them one by one at every `<` of a
    text would take seconds."""
    first, last = min(texts), max(texts)
    common = (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    begin = first[: next(common, len(first))]
    rest: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        rest[text[len(begin) :][:1]].add(text[len(begin) :])
    may_end = rest.pop("", None) is not None
    if not rest:
        return re.escape(begin)
    branches = "|".join(_any_of(each) for _, each in sorted(rest.items()))
    return f"{re.escape(begin)}(?:{branches}){'?' * may_end}"


class ControlTexts:
    """The spellings of control tokens. In "marked" text, every character of a control token that the template wrote is
    replaced by a surrogate."""

    def __init__(self, spellings: Iterable[str]) -> None:
        found = {each for each in spellings if each}
        # Matches the longest spelling at the leftmost position, as tokenizers do.
        self._pattern = re.compile(_any_of(found) if found else r"(?!)")
        alphabet = sorted(set("".join(found)))
        self._marks = {ord(each): chr(_FIRST + n) for n, each in enumerate(alphabet)}
        self._plain = {_FIRST + n: each for n, each in enumerate(alphabet)}

    def mark(self, text: str) -> str:
        """Return a template's own text with its control tokens marked."""
        return self._pattern.sub(lambda found: found[0].translate(self._marks), text)

    def unmark(self, text: str) -> str:
        """Return marked text with the original characters."""
        return _HALF.sub(lambda found: self._plain.get(ord(found[0]), found[0]), text)

    def pieces(self, marked: str) -> list[str]:
        """Split marked text so that only control tokens that the template wrote stay whole: every other spelling of a
        control token is cut in two.

        The concatenated pieces are the unmarked text. Raises CanvasError if there are too many pieces.
        """
        text = self.unmark(marked)
        cuts, at = [0], 0
        while found := self._pattern.search(text, at):
            own = [bool(_HALF.match(each)) for each in marked[found.start() : found.end()]]
            if all(own):
                at = found.end()
                continue
            at = found.start() + (own.index(False) or 1)
            cuts.append(at)
            if len(cuts) > _MOST_CUTS:
                raise CanvasError(
                    f"a text spells control tokens more than {_MOST_CUTS} times", "leave them out"
                )
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


class ChatTemplate:
    """A checkpoint's chat template. `special` are the tokenizer's variables, such as bos_token."""

    def __init__(self, source: str, special: Mapping[str, str], control: ControlTexts) -> None:
        environment = _Environment(control)
        tree = environment.parse(source)
        _MarkOwnText(control).visit(tree)
        tree.set_environment(environment)
        self._template = environment.from_string(tree)
        self._special = {name: environment.own(text) for name, text in special.items()}

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered chat as marked text. Raises CanvasError if the template fails."""
        check_characters(variables)
        try:
            return self._template.render({**self._special, **variables})
        except Exception as error:  # a template may fail in any way on unexpected values
            raise CanvasError(
                f"the chat template refused the messages: {error}",
                "give messages with `role` and `content`, in the order that the model expects",
            ) from error


def check_characters(value: Any) -> None:
    """Raise CanvasError if a string or key in a JSON value contains a lone surrogate."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            if not each.isascii() and _HALF.search(each):
                raise CanvasError("a text has half of a surrogate pair", "send whole characters")
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each


class _OwnText(str):
    """A template's string that contains control tokens. It compares as plain text, and renders as marked text."""

    marked: str

    def __new__(cls, text: str, marked: str | None = None) -> Any:
        # The sandbox's `format` passes no `marked`: its result is plain text, because it contains callers' text.
        if marked is None:
            return text
        own = super().__new__(cls, text)
        own.marked = marked
        return own

    def __str__(self) -> str:
        return self.marked

    def __radd__(self, other: str) -> str:
        return other + self.marked


def _as_written(name: str) -> Any:
    def method(self: _OwnText, *arguments: Any) -> Any:
        return getattr(self.marked, name)(*map(_written, arguments))

    return method


# `format` is not listed, because the sandbox must intercept it.
for _name in ("__add__", "__format__", "__mod__", "__mul__", "join", "lstrip", "rstrip", "strip"):
    setattr(_OwnText, _name, _as_written(_name))


def _written(value: Any) -> Any:
    return value.marked if isinstance(value, _OwnText) else value


class _MarkOwnText(NodeTransformer):
    """Marks control tokens in a template's text. The template's string literals become `_OwnText`, because only at run
    time is it known whether they are rendered or compared."""

    def __init__(self, control: ControlTexts) -> None:
        self._control = control

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._control.mark(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if not isinstance(node.value, str) or self._control.mark(node.value) == node.value:
            return node
        own = nodes.EnvironmentAttribute("own", lineno=node.lineno)
        return nodes.Call(own, [node], [], None, None, lineno=node.lineno)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        if isinstance(node.node, nodes.Const) and isinstance(node.node.value, str):
            # for example '<|turn>{}'.format(role)
            marked = nodes.Const(self._control.mark(node.node.value), lineno=node.lineno)
            return nodes.Getattr(marked, node.attr, node.ctx, lineno=node.lineno)
        self.generic_visit(node)
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """The Jinja environment that transformers uses for templates. It is a sandbox, because templates are untrusted."""

    def __init__(self, control: ControlTexts) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self._control = control
        self.filters["tojson"] = _to_json
        self.filters["replace"] = _replace
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def own(self, text: str) -> str:
        """Return a template's string as `_OwnText`."""
        own: str = _OwnText(text, self._control.mark(text))
        return own


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}` blocks, which mark answers for training, as plain content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    # Jinja's own filter would search for `old` as marked text, which callers' text cannot contain.
    return str(text).replace(old if isinstance(old, str) else str(old), str(new), count)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
