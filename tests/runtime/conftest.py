from tests.helpers.reference import demo, demo_vision, prompt, tiny, undertrained

__all__ = ["demo", "demo_vision", "prompt", "tiny", "undertrained"]
