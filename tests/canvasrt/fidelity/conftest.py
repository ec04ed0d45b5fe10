from tests.helpers.reference import demo, prompt, tiny

__all__ = ["demo", "prompt", "tiny"]
