"""A followed log is printed once and whole, also when the service has begun to leave its middle out."""

import time

import pytest

from muonscope.cli.growing_logs import new_text

HEAD, KEPT = 400, 3000


def kept(text: str) -> str:
    """As the service keeps it, on a smaller scale: cut where a piece begins."""
    cut = text.find("\n", max(0, len(text) - KEPT)) + 1
    if cut <= HEAD:
        return text
    return f"{text[:HEAD]}\n[... {cut - HEAD} bytes left out ...]\n{text[cut:]}"


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_a_long_log_is_given_once_however_often_it_is_read(batch: int) -> None:
    lines = [f"step {number}: loss {number % 7}\n" for number in range(1000)]
    before, printed = "", ""

    for end in range(batch, len(lines) + batch, batch):
        now = kept("".join(lines[:end]))
        printed += new_text(before, now)
        before = now

    assert printed == "".join(lines)


def test_where_more_has_come_than_is_kept_what_is_missing_is_said() -> None:
    lines = [f"step {number}\n" for number in range(2000)]
    before, now = kept("".join(lines[:500])), kept("".join(lines))

    new = new_text(before, now)

    assert new.startswith("\n[... ")
    assert new.endswith("step 1999\n")


def test_the_next_attempts_log_is_given_from_its_beginning() -> None:
    assert new_text("first attempt\n" * 100, "") == ""
    assert new_text("first attempt\n" * 100, "second attempt\n") == "second attempt\n"


def test_a_log_of_one_line_repeated_is_read_quickly() -> None:
    before = "no news\n" * 140_000
    now = f"{before[:131_072]}\n[... 8000 bytes left out ...]\n" + "no news\n" * 131_072

    began = time.process_time()
    new_text(before, now)

    assert time.process_time() - began < 1.0
