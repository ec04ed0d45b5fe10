import os
from typing import Annotated

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

BASE = os.environ["BASE"]


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


def weather(city: str) -> str:
    """The weather of a city."""
    return city


options = {"api_key": "x", "is_chat_model": True, "is_function_calling_model": True}
for llm in (
    Ollama(model="canvasrt", base_url=BASE, temperature=0),
    OpenAILike(model="canvasrt", api_base=BASE + "/v1", temperature=0, **options),
):
    assert llm.complete("12+34=").text == "46"
    assert llm.chat([ChatMessage(role="user", content="12+34=")]).message.content == "46"
    assert "".join(each.delta or "" for each in llm.stream_complete("12+34=")) == "46"
    assert isinstance(llm.as_structured_llm(Sum).complete("12+34=").raw, Sum)
    tool = FunctionTool.from_defaults(weather)
    assert llm.chat_with_tools([tool], user_msg="12+34=").message.content == "46"
