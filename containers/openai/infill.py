"""`/v1/infill`, an extension of OpenAI's API: fills the gaps of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from canvasrt.containers.openai.body import Body, Seed
from canvasrt.containers.openai.chunks import OwnFields, UsageJson, usage_json
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.generation import Answer, Generation, Reply
from canvasrt.types import Json


class InfillRequest(Body):
    """The body of `POST /v1/infill`."""

    text: str
    prompt: str | None = None
    seed: Seed = None
    max_denoising_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None


class Infilled(TypedDict):
    """The filled text, and the texts of its gaps."""

    model: str
    text: str
    gaps: list[str]
    logprob: float
    usage: UsageJson
    canvasrt: OwnFields


class InfillReply(Reply):
    """Renders the filled text and the texts of its gaps."""

    text_field = "text"

    def whole(self, answers: Sequence[Answer]) -> Json:
        return {
            "model": self.body.model,
            **json.loads(answers[0].final.text),
            "usage": usage_json(self.usage),
            "canvasrt": self.own_fields(),
        }


def infill(body: InfillRequest) -> Generation:
    """Return the generation that fills a text's gaps."""
    # Imported here because it loads the tokenizer module, which takes time and memory.
    from canvasrt.runtime.answers.infill import default_prompt

    options = {"infill": body.text, "max_denoising_steps": body.max_denoising_steps}
    prompt = {"prompt": body.prompt or default_prompt(body.text)}
    return Generation(
        options, prompts=[prompt], seed=body.seed or 0, plain=True, ignored=body.ignored
    )


INFILL = Endpoint(
    "/v1/infill", "Fill the gaps of a text.", InfillRequest, infill, InfillReply, Infilled
)
