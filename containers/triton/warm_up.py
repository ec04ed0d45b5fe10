"""Runs every shape of a model's passes before the first request."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from canvasrt.runtime.model import Model

log = logging.getLogger(__name__)


def warmed_up(model: Model, proves: bool) -> dict[str, Any]:
    """Run every shape of a model's passes. On a GPU that takes several requests, and with `proves`, find out whether they may
    share passes; return what was found."""
    if not proves or model.rows_apart is False or (model.max_batch or 1) == 1:
        model.warm_up()
        return {}
    from canvasrt.runtime.gpu.device_model import DeviceModel
    from canvasrt.runtime.gpu.sharing import prove

    if not isinstance(model, DeviceModel):
        model.warm_up()
        return {}
    found = prove(model)
    if found.why:
        what = "a lone request pays for others" if found.shared else "requests share no passes"
        log.warning("%s: %s", what, found.why)
    return asdict(found)
