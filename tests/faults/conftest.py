from tests.helpers.alone import alone, front

__all__ = ["alone", "front"]
