"""Settings of the optimizer, without torch: processes that compute nothing read them too."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and clipping.

    Example: ``OptimizerSettings(learning_rate=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.0, gradient_clip=0.5)``.
    """

    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    gradient_clip: float
