"""Whether a run whose attempt ended badly gets another attempt, and after which pause. Pure.

Infrastructure faults may pass; a verdict-bearing death (the loss scale is exhausted, the task raised) would only
repeat itself.
"""

from dataclasses import dataclass

from muonscope.contract.attempts import Failure


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 3
    backoff_s: float = 2.0
    """Before the second attempt; doubles with each further one."""
    max_backoff_s: float = 300.0


def retry_reason(failure: Failure | None, attempts: int, policy: RetryPolicy) -> str | None:
    """Say why there is another attempt after number `attempts`; None: there is none."""
    if failure is None or not failure.kind.is_infrastructure or attempts >= policy.max_attempts:
        return None
    return f"attempt {attempts} of {policy.max_attempts} ended as {failure.kind}, which another attempt may survive"


def backoff_s(attempts: int, policy: RetryPolicy) -> float:
    """Return the pause between the end of attempt number `attempts` and the next one's start."""
    if attempts < 1:
        return 0.0
    # The exponent is bounded: a float overflows long after any pause that makes sense.
    return float(min(policy.max_backoff_s, policy.backoff_s * 2 ** min(attempts - 1, 30)))
