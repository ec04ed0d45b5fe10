import json
import os
from typing import Any

import litellm

BASE = os.environ["BASE"]
number = {"type": "integer", "minimum": 0, "maximum": 99}
schema = {
    "type": "object",
    "properties": {"sum": number},
    "required": ["sum"],
    "additionalProperties": False,
}
wanted = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}}
tools = [{"type": "function", "function": {"name": "sum", "parameters": schema}}]
routes = {"ollama": BASE, "ollama_chat": BASE, "openai": BASE + "/v1", "hosted_vllm": BASE + "/v1"}


def answer(route: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": "12+34="}]
    options = {"api_base": routes[route], "api_key": "x", "temperature": 0, "messages": messages}
    return litellm.completion(model=f"{route}/canvasrt", **options, **more)


def text(route: str, **more: Any) -> str:
    return answer(route, **more).choices[0].message.content


for route in routes:
    # Ollama's `generate` takes no chats, so on this route LiteLLM adds headings to the prompt, and the answer differs.
    exact = route != "ollama"
    assert text(route) == "46" or not exact
    chunks = list(answer(route, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "46" or not exact
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert 0 <= json.loads(text(route, response_format=wanted))["sum"] <= 99
    if exact:
        assert text(route, tools=tools) == "46"
