from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.agents import acting, acting_server, agent
from tests.helpers.scripted import core, gemma_template
from tests.helpers.web_page import browser, visit

__all__ = ["acting", "acting_server", "agent", "browser", "visit"]


def save_with_gemmas_words(model: Any, folder: Path) -> None:
    """Write a checkpoint of a random model, with Gemma's tokens and template."""
    tokenizer = core()
    for name, token in {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>"}.items():
        setattr(model.config, f"{name}_token_id", tokenizer.token_to_id(token))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    (folder / "chat_template.jinja").write_text(gemma_template())
