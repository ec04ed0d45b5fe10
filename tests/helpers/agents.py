"""A server whose model follows scripts with thoughts and tool calls, shared by the tests of clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.scripted import Script, Served, client_of, gemma_template, serving, write_bundle

if TYPE_CHECKING:
    from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PARIS = 'call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
SCRIPTS = {
    "plain": ["Hello there."],
    "thinks": ["<|channel>thought\nThey greet me.\n<channel|>Hello there."],
    "calls": [f"<|tool_call>{PARIS}<|tool_response>", "It is sunny in Paris."],
    "thinks and calls": [
        f"<|channel>thought\nI should look.\n<channel|><|tool_call>{PARIS}<|tool_response>",
        # The template begins this thought after a tool's result.
        "Now I know.\n<channel|>It is sunny in Paris.",
    ],
    "two": [
        f"Both:<|tool_call>{PARIS}<|tool_call>call:clock{{}}<tool_call|><|tool_response>",
        "never said, as two results come",
        "Sunny, and noon.",
    ],
    "long": [
        f"<|channel>thought\n{'so ' * 120}\n<channel|>Then:<|tool_call>"
        f'call:weather{{city:<|"|>{"x" * 300}<|"|>}}<tool_call|><|tool_response>'
    ],
}


@pytest.fixture(scope="session")
def acting() -> Script:
    """The scripts of the server's answers. `acting.choose(name)` selects one."""
    return Script(SCRIPTS)


@pytest.fixture(scope="session")
def acting_server(acting: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = write_bundle(tmp_path_factory.mktemp("acting") / "graphs", acting, gemma_template())
    with serving(bundle) as served:
        yield served


@pytest.fixture(scope="session")
def agent(acting_server: Served) -> Iterator[OpenAI]:
    """The real OpenAI client of this server."""
    with client_of(acting_server) as client:
        yield client
