import os
from typing import Annotated

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


@tool
def weather(fahrenheit: bool) -> str:
    """The weather."""
    return str(fahrenheit)


chat = ChatOpenAI(model="canvasrt", base_url=os.environ["BASE"] + "/v1", api_key="x", temperature=0)
assert chat.invoke("12+34=").content == "46"
assert "".join(each.content for each in chat.stream("12+34=")) == "46"
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Sum, method=method).invoke("12+34="), Sum)
assert chat.bind_tools([weather]).invoke("12+34=").content == "46"
called = chat.bind_tools([weather], tool_choice="any").invoke("12+34=")
assert isinstance(called.tool_calls[0]["args"]["fahrenheit"], bool)
