import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE"], api_key="x")
ask = {
    "model": "canvasrt",
    "max_tokens": 64,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "12+34="}],
}
assert client.messages.create(**ask).content[0].text == "46"
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream) == "46"
units = {"enum": ["celsius", "kelvin"]}
schema = {
    "type": "object",
    "properties": {"unit": units},
    "required": ["unit"],
    "additionalProperties": False,
}
tools = [{"name": "weather", "input_schema": schema}]
assert client.messages.create(**ask, tools=tools).content[0].text == "46"
answer = client.messages.create(**ask, tools=tools, tool_choice={"type": "tool", "name": "weather"})
assert answer.stop_reason == "tool_use"
assert answer.content[0].input["unit"] in units["enum"]
assert client.messages.count_tokens(model="canvasrt", messages=ask["messages"]).input_tokens > 6
