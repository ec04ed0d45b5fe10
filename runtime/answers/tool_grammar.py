"""Grammars of tool calls, whose arguments are JSON that follows the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from canvasrt.chat_tokens import CALL, CALL_END, CONTROL_TOKENS, THOUGHT, THOUGHT_END
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.rewriting import without_unique
from canvasrt.runtime.tokenizer import Tokenizer

# How much of a call the prompt already contains; see `call_grammar`.
BEGUN = ("nothing", "call", "name")
_NAME = re.compile(r"[\w.:-]{1,128}")


def call_grammar(spec: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Return a Lark grammar of answers that call tools. Raises CanvasError, which names the mistake.

    `spec` has the fields
    - `tools`: schemas, keyed by the tools' names;
    - `begun`: how the prompt ends: `name` after `<|tool_call>call:name`, `call` after `<|tool_call>call:`, or
    `nothing` if text and thoughts can come first;
    - `answer`: the JSON schema that an answer without calls must follow, or None if it can be any text;
    - `parallel`: whether one answer can have several calls;
    - `strict`: if false, keywords that cannot be enforced are ignored.
    """
    tools, begun, answer = spec.get("tools"), spec.get("begun"), spec.get("answer")
    if not isinstance(tools, dict) or not tools or begun not in BEGUN:
        raise CanvasError("grammar has no tools", f"give tools, and begun: {', '.join(BEGUN)}")
    token = {}
    for text in (CALL, CALL_END, THOUGHT, THOUGHT_END):
        if (id := tokenizer.control_id(text)) is not None:
            token[text] = f"<[{id}]>"
        elif text in (CALL, CALL_END):
            raise CanvasError(f"the model has no token {text}", "leave out tools")
    end, rules = token[CALL_END], []
    for number, (name, schema) in enumerate(tools.items()):
        if not _NAME.fullmatch(name) or not isinstance(schema, dict):
            raise CanvasError(
                f"grammar.tools.{name[:200]} has an invalid name or schema",
                "give a name of at most 128 letters, digits and _.:- and a JSON schema",
            )
        strict = bool(spec.get("strict"))
        if strict:
            schema = without_unique(schema, "grammar")
        # Arguments are always an object, even if the schema allows other types.
        rules.append(f"args{number}: {_json({'type': 'object', **schema}, strict)}")
    ways = [f"{json.dumps(name)} args{number}" for number, name in enumerate(tools)]
    rules.append("one: " + " | ".join(f"{way} {end}" for way in ways))
    rules.append(f'call: {token[CALL]} "call:" one')
    more = " call*" if spec.get("parallel") else ""
    if begun == "name":
        rules.append(f"start: args0 {end}")
    elif begun == "call":
        rules.append(f"start: one{more}")
    elif answer is not None:
        if not isinstance(answer, dict):
            raise CanvasError("grammar.schema is not an object", "give an object")
        rules.append(f"answer: {_json(without_unique(answer, 'grammar'), strict=True)}")
        rules.append(f"start: answer | call{more}")
    else:
        rules.append("TEXT: /(?s:.+)/")
        thoughts = [token[text] for text in (THOUGHT, THOUGHT_END) if text in token]
        rules.append("said: " + " | ".join(["TEXT", *thoughts]))
        rules.append(f"start: said* (call{more})?")
    return "\n".join(rules)


def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that begin and end thoughts and calls. Only grammars of tool calls can contain them."""
    found = (tokenizer.control_id(text) for text in CONTROL_TOKENS)
    return frozenset(id for id in found if id is not None)


def _json(schema: Mapping[str, Any], strict: bool) -> str:
    options = {"whitespace_flexible": False, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"
