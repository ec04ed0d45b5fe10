from tests.helpers.agents import acting, acting_server, agent

__all__ = ["acting", "acting_server", "agent"]
