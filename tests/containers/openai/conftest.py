from tests.helpers.agents import acting, acting_server, agent
from tests.helpers.web_page import browser, visit

__all__ = ["acting", "acting_server", "agent", "browser", "visit"]
