"""What the parameter groups of somebody else's optimizer are set to, in a spec's words. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

# A group's own words for what a spec's `optimizer` says, and for what its `optimizer.adam` does.
_OPTIMIZER: Final = ("lr", "momentum", "weight_decay", "nesterov", "ns_method", "ns_steps")
_ADAM: Final = ("lr", "betas", "eps", "weight_decay")


def optimizer_settings(groups: Sequence[Mapping[str, Any]], *, ns_method: str) -> tuple[dict[str, Any], list[str]]:
    """Read the settings of Muon and of Adam out of an optimizer's groups.

    Args:
        groups: the optimizer's: Muon's are known by `route` (`muon_core`) or `use_muon` (DeepSpeed), Adam's by `betas`.
        ns_method: of a Muon whose groups do not say theirs.
    Returns:
        The spec's `optimizer` and, a sentence each, what it does not show: settings in which groups of one kind differ.
    """
    muon = [group for group in groups if _is_muons(group)]
    adam = [group for group in groups if "betas" in group and not _is_muons(group)]
    unlike: list[str] = []
    of_adam = _common(adam, _ADAM, "optimizer.adam", unlike)
    # Where no Muon is, the other optimizer's settings are all there are; what is said of Adam's is said once.
    of_muon = _common(muon or groups, _OPTIMIZER, "optimizer", unlike if muon or not adam else [])
    said = {"momentum": 0.0, "weight_decay": 0.0, **({"ns_method": ns_method} if muon else {}), **of_muon}
    if betas := of_adam.pop("betas", None):
        of_adam["beta1"], of_adam["beta2"] = betas
    return {**said, "adam": of_adam}, unlike


def _is_muons(group: Mapping[str, Any]) -> bool:
    return bool(group.get("route") == "muon" or group.get("use_muon"))


def _common(groups: Sequence[Mapping[str, Any]], names: Sequence[str], field: str, unlike: list[str]) -> dict[str, Any]:
    """Return what the first group is set to, and tell of the settings in which others are not."""
    found: dict[str, Any] = {}
    for name in names:
        values = [_plain(_setting(group, name)) for group in groups if name in group]
        if values:
            found[name] = values[0]
        if distinct := [value for place, value in enumerate(values) if value not in values[:place]][1:]:
            others = ", ".join(str(value) for value in distinct)
            unlike.append(f"{field}.{name}={values[0]} is the first group's, and others have {others}")
    return found


def _setting(group: Mapping[str, Any], name: str) -> Any:
    # A schedule has moved the rate itself already: in a warm-up's first step every group's is the same nothing.
    return group.get("initial_lr", group["lr"]) if name == "lr" else group[name]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, int | str):
        return value
    return tuple(map(float, value)) if isinstance(value, Sequence) else float(value)
