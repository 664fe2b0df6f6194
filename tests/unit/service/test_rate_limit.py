"""Token buckets."""

from service.api.rate_limit import RateLimiter


def test_a_bucket_gives_its_burst_then_its_rate_and_says_how_long_to_wait() -> None:
    now = [0.0]
    limiter = RateLimiter(rate_per_s=2.0, burst=3, clock=lambda: now[0])

    assert [limiter.pause("a") for _ in range(4)] == [None, None, None, 0.5]
    now[0] = 0.5
    assert [limiter.pause("a"), limiter.pause("a")] == [None, 0.5]
    now[0] = 100.0
    assert [limiter.pause("a") for _ in range(4)] == [None, None, None, 0.5]


def test_one_callers_haste_costs_another_nothing() -> None:
    limiter = RateLimiter(rate_per_s=1.0, burst=1, clock=lambda: 0.0)

    assert [limiter.pause("a"), limiter.pause("a"), limiter.pause("b")] == [None, 1.0, None]


def test_memory_is_bounded_however_many_callers_there_are() -> None:
    limiter = RateLimiter(rate_per_s=1.0, burst=1, max_callers=100, clock=lambda: 0.0)
    for caller in range(10_000):
        limiter.pause(str(caller))

    assert len(limiter) == 100
    assert limiter.pause("9999") == 1.0, "the newest are remembered"
