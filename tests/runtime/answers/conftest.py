from tests.helpers.reference import demo, prompt, tiny, undertrained

__all__ = ["demo", "prompt", "tiny", "undertrained"]
