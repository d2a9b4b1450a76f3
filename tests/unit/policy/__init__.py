"""Policies: values in, values out."""

from hypothesis import HealthCheck, settings

# A busy machine is slow, and no time is asserted.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
