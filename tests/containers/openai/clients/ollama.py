import json
import os

import ollama

client = ollama.Client(host=os.environ["BASE"])
options = {"temperature": 0}
chat = {
    "model": "canvasrt",
    "messages": [{"role": "user", "content": "12+34="}],
    "options": options,
}
number = {"type": "integer", "minimum": 0, "maximum": 99}
schema = {"type": "object", "properties": {"sum": number}, "required": ["sum"]}
assert client.generate("canvasrt", "12+34=", options=options).response == "46"
assert client.chat(**chat).message.content == "46"
assert "".join(each.message.content for each in client.chat(**chat, stream=True)) == "46"
assert 0 <= json.loads(client.chat(**chat, format=schema).message.content)["sum"] <= 99


def weather(city: str) -> str:
    """The weather of a city."""
    return city


assert client.chat(**chat, tools=[weather]).message.content == "46"
assert client.list().models[0].model == client.ps().models[0].model == "canvasrt"
assert "tools" in client.show("canvasrt").capabilities
