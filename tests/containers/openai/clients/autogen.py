import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


async def weather(city: str) -> str:
    """The weather of a city."""
    return city


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model="canvasrt",
        base_url=os.environ["BASE"] + "/v1",
        api_key="x",
        model_info=INFO,
        temperature=0,
    )
    agent = AssistantAgent("adder", client, system_message=None)
    assert (await agent.run(task="12+34=")).messages[-1].content == "46"
    agent = AssistantAgent(
        "adder", client, tools=[weather], system_message=None, model_client_stream=True
    )
    events = [each async for each in agent.run_stream(task="12+34=")]
    assert events[-1].messages[-1].content == "46"


asyncio.run(main())
