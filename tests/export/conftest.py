from tests.helpers.random_models import exported

__all__ = ["exported"]
