import os
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


provider = OpenAIProvider(base_url=os.environ["BASE"] + "/v1", api_key="x")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("canvasrt", provider=provider, settings={"temperature": 0})
    agent = Agent(model)
    assert agent.run_sync("12+34=").output == "46"

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    assert agent.run_stream_sync("12+34=").get_output() == "46"
    for output in (Sum, NativeOutput(Sum)):
        assert isinstance(Agent(model, output_type=output).run_sync("12+34=").output, Sum)
