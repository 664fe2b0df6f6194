"""How many examples a property test tries where each one is dear: it costs a store, a service or a shell.

`HYPOTHESIS_PROFILE=thorough` tries ten times as many, here and wherever Hypothesis's own number is used.
"""

import os

from hypothesis import settings

FACTOR = 10
# Shared machines are slow at times: a deadline per example would test the machine.
settings.register_profile("default", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=FACTOR * settings.get_profile("default").max_examples)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")


def dear(count: int) -> int:
    """Return the number of examples in the profile that is loaded."""
    return count * FACTOR if PROFILE == "thorough" else count
