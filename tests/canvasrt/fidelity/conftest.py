from tests.helpers.reference import demo, tiny

__all__ = ["demo", "tiny"]
