"""Hypothesis profiles: few examples in the unit suite, many under ``make check-deep``."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("unit", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))
