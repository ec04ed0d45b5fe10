import os
from typing import Annotated

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]


openai = OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="x")
ask = {
    "model": "canvasrt",
    "messages": [{"role": "user", "content": "12+34="}],
    "response_model": Sum,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    assert isinstance(client.chat.completions.create(**ask), Sum)
    assert isinstance(list(client.chat.completions.create_partial(**ask))[-1].sum, int)
