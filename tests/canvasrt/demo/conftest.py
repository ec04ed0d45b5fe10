from tests.helpers.reference import demo

__all__ = ["demo"]
