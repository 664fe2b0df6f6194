"""How two numbers are written beside each other, wherever that is."""


def apart(one: float, other: float, digits: int = 6) -> tuple[str, str]:
    """Write two numbers with as many digits as it takes to see that they differ, and no fewer than `digits`."""
    for places in range(digits, 17):
        texts = f"{one:.{places}g}", f"{other:.{places}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(one), repr(other)
