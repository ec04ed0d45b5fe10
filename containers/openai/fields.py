"""Decides which unsupported fields of OpenAI's, vLLM's, Anthropic's and Ollama's requests are ignored or refused.

Each table maps unsupported fields to their accepted values, which do not change the answer. A list is accepted if all
of its elements are accepted. Any other value is refused or, by a lenient server, ignored with a warning. A field that
is neither in a table nor in the body's model is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from canvasrt.containers.openai.errors import bad_request, path_of

Table = Mapping[str, tuple[Any, ...] | None]
ANY = None  # every value is accepted, because none changes the answer
MAX_WARNINGS = 16  # per request


def _any(names: str) -> Table:
    return dict.fromkeys(names.split(), ANY)


# Fields of all requests that generate text.
GENERATION: Table = {
    **_any("user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options"),
    **_any("metadata client_metadata service_tier store moderation"),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    # Fields of vLLM's API.
    **_any("request_id priority cache_salt kv_transfer_params length_penalty"),
    **_any("spaces_between_special_tokens guided_decoding_backend guided_whitespace_pattern"),
    **_any("stream_options.include_obfuscation stream_options.continuous_usage_stats"),
    "repetition_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "logits_processors": (),
    "return_token_ids": (False,),
    "vllm_xargs.logprob_token_ids": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    **_any("structured_outputs.disable_fallback structured_outputs.disable_any_whitespace"),
    **_any("structured_outputs.whitespace_pattern"),
    "structured_outputs.disable_additional_properties": (False,),
    "structured_outputs.structural_tag": (),
}
# Fields of chats.
CHAT: Table = {
    **GENERATION,
    **_any("prediction audio verbosity tools.cache_control tools.function.cache_control"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": ("text",),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "documents": (),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
COMPLETION: Table = {
    **GENERATION,
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
RESPONSE: Table = {
    **GENERATION,
    **_any("truncation max_tool_calls context_management text.verbosity"),
    # Thoughts are returned in full, so there are no summaries to choose from.
    **_any("reasoning.summary reasoning.generate_summary"),
    "include": (
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    ),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    # Fields of chats that `/v1/responses` does not have.
    "n": (1,),
    "max_tokens": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
ANTHROPIC: Table = {
    **GENERATION,
    **_any("cache_control context_management diagnostics inference_geo speed output_config.effort"),
    "container": (),
    "mcp_servers": (),
    # Fields of chats that `/v1/messages` does not have.
    "n": (1,),
    "stop": (),
    "response_format": (),
    "max_completion_tokens": (),
}
TOKENIZE: Table = {
    "continue_final_message": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
DECISION: Table = _any("safety_identifier prompt_cache_key prompt_cache_options metadata user")
# Fields of Ollama's requests and of their `options`.
OLLAMA: Table = {
    **_any("truncate shift"),
    "suffix": ("",),
    "template": ("",),
    "context": (),
    **_any("options.num_ctx options.num_keep options.num_batch options.num_gpu options.num_gqa"),
    **_any("options.main_gpu options.num_thread options.use_mmap options.use_mlock options.numa"),
    **_any("options.low_vram options.f16_kv options.vocab_only options.logits_all"),
    **_any("options.repeat_last_n options.mirostat_eta options.mirostat_tau"),
    **_any("options.penalize_newline options.rope_frequency_base options.rope_frequency_scale"),
    "options.repeat_penalty": (1, 1.1),  # 1.1 is Ollama's own default
    "options.presence_penalty": (0,),
    "options.frequency_penalty": (0,),
    "options.mirostat": (0,),
    "options.tfs_z": (1,),
    "options.typical_p": (1,),
}
# Fields of a chat's messages and of their content parts.
MESSAGE: Table = {
    **_any("name id status phase annotations cache_control content.cache_control"),
    "audio": (),
    "function_call": (),
    "refusal": (),
}

_PENALTY = "the tokens of a block are decided together, not one after the other"
# Reasons for refusals that the field's name does not explain.
REASONS = {
    "best_of": "the server returns all n answers",
    "background": "nothing is stored here",
    "previous_response_id": "nothing is stored here",
    "conversation": "nothing is stored here",
    "functions": "send tools instead",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "options.presence_penalty": _PENALTY,
    "options.frequency_penalty": _PENALTY,
    "options.repeat_penalty": _PENALTY,
}


def passes(allowed: tuple[Any, ...] | None, value: Any) -> bool:
    """Return whether this value of a field leaves the answer unchanged."""
    if value is None or allowed is ANY:
        return True
    if isinstance(value, list):
        return all(passes(allowed, each) for each in value)
    # In Python, True == 1; JSON distinguishes them.
    return any(isinstance(value, bool) == isinstance(e, bool) and value == e for e in allowed)


class Ignored(list[str]):
    """Warnings about a request's ignored fields. If `lenient`, fields that would change the answer are ignored, too.
    If `thinks` is false, the model cannot think, so `reasoning_effort` is ignored."""

    def __init__(self, lenient: bool = False, thinks: bool = True) -> None:
        super().__init__()
        self.lenient = lenient
        self.thinks = thinks

    def note(self, message: str) -> None:
        """Add a warning, unless the list already has it or is full (MAX_WARNINGS)."""
        if len(self) < MAX_WARNINGS and message not in self:
            self.append(message)


def settle(path: str, value: Any, table: Table, ignored: Ignored | None) -> None:
    """Ignore an unsupported field. If `table` does not accept its value, add a warning to `ignored`.

    Raises ApiError instead of adding a warning if `ignored` is None, or if the field is in `table` and
    `ignored.lenient` is false.
    """
    name = re.sub(r"\[\d+\]", "", path)
    if name not in table:
        error = bad_request(f"Unknown parameter: {path!r}.", path, "unknown_parameter")
        if ignored is None:
            raise error
    elif passes(allowed := table[name], value):
        return
    else:
        why = f": {REASONS[name]}" if name in REASONS else ""
        values = " or ".join(json.dumps(each) for each in allowed or ())
        way_out = f"Leave it out{f', or send {values}' if values else ''}."
        message = f"{path} is not supported{why}. {way_out}"
        error = bad_request(message, path, "unsupported_parameter")
        if ignored is None or not ignored.lenient:
            raise error
    ignored.note(error.message)


def leave_out(
    data: Any, errors: Iterable[Mapping[str, Any]], table: Table, ignored: Ignored | None
) -> bool:
    """Remove unknown fields from a JSON value, and pass them to `settle`. Return whether the value contained all of
    them.

    `errors` are pydantic's. Validation stops at a list's first wrong element, so a field is removed from all elements.
    """
    objects: dict[tuple[int | str, ...], list[dict[str, Any]]] = {}
    for error in errors:
        *path, name = error["loc"]
        place = tuple(path)
        if place not in objects:
            objects[place] = _objects(data, path)
        if not (holders := [each for each in objects[place] if name in each]):
            return False
        for each in holders:
            del each[name]
        settle(path_of(error["loc"]), error["input"], table, ignored)
    return True


def _objects(data: Any, path: Iterable[int | str]) -> list[dict[str, Any]]:
    """Return the objects at a path. A number in the path stands for all elements of a list."""
    found = [data]
    for part in path:
        if isinstance(part, int):
            found = [one for each in found if isinstance(each, list) for one in each]
        else:
            found = [each[part] for each in found if isinstance(each, dict) and part in each]
    return [each for each in found if isinstance(each, dict)]


def known(
    given: Mapping[str, Any],
    names: Collection[str],
    path: str,
    table: Table,
    ignored: Ignored | None,
) -> dict[str, Any]:
    """Return the members of `given` whose names are in `names`; pass all other members to `settle`."""
    for name, value in given.items():
        if name not in names:
            settle(f"{path}.{name}", value, table, ignored)
    return {name: value for name, value in given.items() if name in names}
