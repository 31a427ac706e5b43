"""The tests do not depend on who started them, and property tests do not look at the clock."""

import signal
from importlib.util import find_spec

# A shell without job control starts background jobs with Ctrl-C ignored, which every process of a test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("hypothesis"):  # environments for one engine or executor have no property tests
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
