"""Types that all stages share; imports nothing of canvasrt."""

from typing import Any

Json = dict[str, Any]  # a JSON object
