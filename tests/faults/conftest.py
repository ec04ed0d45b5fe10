from tests.helpers.serving import _one_thread, engines, graphs, packaged

__all__ = ["_one_thread", "engines", "graphs", "packaged"]
