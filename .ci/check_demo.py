"""Hold the demo's table against the published one, written out here a second time so that one slip is seen.

Usage: muonscope experiment run thirty-step --json | python .ci/check_demo.py
"""

import json
import sys
from typing import Any

DIES = {"moved": "0/10", "momentum finite": False, "outcome": "dies at step 17", "overflows": 17, "final scale": 1}
TRAINS = {"moved": "10/10", "momentum finite": True, "outcome": "trains"}
PUBLISHED: dict[tuple[int, int, str], dict[str, Any]] = {
    (stage, scale, ordering): DIES if (scale, ordering) == (65536, "master") else TRAINS
    for stage in (1, 2)
    for scale in (65536, 1)
    for ordering in ("master", "ordered")
}
KEY = ("stage", "initial scale", "ordering")


def differences(table: dict[str, Any]) -> list[str]:
    """Name every row and figure that is not as published."""
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]]
    found = {tuple(row[name] for name in KEY): row for row in rows}
    problems = [f"there is no row for {key}" for key in PUBLISHED if key not in found]
    problems += [f"there is a row too many: {key}" for key in found if key not in PUBLISHED]
    for key in PUBLISHED.keys() & found.keys():
        row = found[key]
        wrong = {name: row[name] for name, expected in PUBLISHED[key].items() if row[name] != expected}
        problems += [f"{key}: {name} is {value}, published {PUBLISHED[key][name]}" for name, value in wrong.items()]
        # A weight that moved 1e-5 is not training; one that must not move at all has not.
        motion = row["largest weight motion"]
        if motion != 0 if PUBLISHED[key] is DIES else not 0.1 < motion < 100:
            problems.append(f"{key}: largest weight motion is {motion}")
    return problems


if __name__ == "__main__":
    problems = differences(json.load(sys.stdin)["table"])
    print("\n".join(problems) or "the demo's table is the published one")
    sys.exit(1 if problems else 0)
