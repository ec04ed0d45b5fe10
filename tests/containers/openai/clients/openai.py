import os
from typing import Annotated

import openai
from pydantic import BaseModel, Field


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


client = openai.OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="x")
settings = {"model": "canvasrt", "temperature": 0}
ask = {**settings, "messages": [{"role": "user", "content": "12+34="}]}
chats = client.chat.completions
assert chats.create(**ask).choices[0].message.content == "46"
with chats.stream(**ask) as stream:
    assert stream.get_final_completion().choices[0].message.content == "46"
assert isinstance(chats.parse(**ask, response_format=Sum).choices[0].message.parsed, Sum)
tools = [openai.pydantic_function_tool(Sum)]
assert chats.create(**ask, tools=tools).choices[0].message.content == "46"
(call,) = (
    chats.parse(**ask, tools=tools, tool_choice="required", parallel_tool_calls=False)
    .choices[0]
    .message.tool_calls
)
assert isinstance(call.function.parsed_arguments, Sum)
assert client.responses.create(**settings, input="12+34=").output_text == "46"
assert isinstance(
    client.responses.parse(model="canvasrt", input="12+34=", text_format=Sum).output_parsed, Sum
)
prompt = "<|turn>user\n12+34=<turn|>\n<|turn>model\n"
answer = client.completions.create(**settings, prompt=prompt, max_tokens=8)
assert answer.choices[0].text == "46"
assert client.models.list().data[0].id == "canvasrt"
