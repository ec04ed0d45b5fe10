"""Types that all stages share; imports nothing."""

from typing import Any

Json = dict[str, Any]  # a JSON object
