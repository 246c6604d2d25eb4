"""Settings of the losses, without torch: processes that compute nothing read them too."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Which importance weights are used, and their bounds.

    Example: ``LossSettings(importance="truncated", importance_cap=2.0)``.
    """

    importance: Literal["clipped", "truncated", "masked"] = "truncated"
    importance_cap: float = 2.0
    importance_floor: float = 0.5
    clip_low: float = 0.2
    clip_high: float = 0.28
