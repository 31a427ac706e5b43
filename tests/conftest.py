"""Property tests do not look at the clock."""

from importlib.util import find_spec

if find_spec("hypothesis"):  # environments for one engine or executor have no property tests
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
