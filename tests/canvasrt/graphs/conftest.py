from tests.helpers.quantized import plain_graphs, quantized

__all__ = ["plain_graphs", "quantized"]
