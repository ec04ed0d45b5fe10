"""Tools as the body of a request declares them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOOLS = 128  # as in OpenAI's API
Name = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class _Named(_Strict):
    name: Name


class NamedTool(_Strict):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
