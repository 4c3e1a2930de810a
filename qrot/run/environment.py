"""Where something was measured: versions and machine."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from typing import Any

import jax
import numpy as np

import qrot


def environment() -> dict[str, Any]:
    """Versions, device, cores and the date, in plain values."""
    device = jax.devices()[0]
    return {
        "qrot": qrot.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.device_kind} ({device.platform}, {platform.machine()})",
        "cores": os.cpu_count(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
