import os
from typing import Annotated

from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from pydantic import BaseModel, Field


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


@tool
def weather(city: str) -> str:
    """The weather."""
    return city


chat = ChatOllama(model="canvasrt", base_url=os.environ["BASE"], temperature=0)
assert chat.invoke("12+34=").content == "46"
assert "".join(each.content for each in chat.stream("12+34=")) == "46"
assert isinstance(chat.with_structured_output(Sum).invoke("12+34="), Sum)
assert chat.bind_tools([weather]).invoke("12+34=").content == "46"
