"""docker-compose.yml, read as strictly as the tests need it: merged, interpolated, every key known."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
COMPOSE: Final = ROOT / "docker-compose.yml"
# The keys that this file uses, of those that the Compose specification has.
SERVICE_KEYS: Final = frozenset(
    {
        "build", "cap_drop", "command", "depends_on", "deploy", "environment", "healthcheck", "image", "init",
        "ports", "profiles", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period", "user", "volumes",
    }
)  # fmt: skip
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Service:
    """One service of the file."""

    name: str
    raw: dict[str, Any]

    @property
    def command(self) -> list[str]:
        return [str(word) for word in self.raw.get("command", [])]

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.raw.get("environment", {}))

    @property
    def depends_on(self) -> dict[str, str]:
        return {name: about["condition"] for name, about in self.raw.get("depends_on", {}).items()}

    @property
    def health(self) -> list[str] | None:
        """The command that says whether it is well; None where nothing does."""
        test = self.raw.get("healthcheck", {}).get("test")
        if test is None:
            return None
        assert test[0] == "CMD", f"{self.name}: no shell is needed to see whether it is well"
        return [str(word) for word in test[1:]]

    @property
    def is_ours(self) -> bool:
        """Whether it runs from the image that deploy/Dockerfile builds."""
        return str(self.raw["image"]).startswith("muonscope:")

    @property
    def muonscope_commands(self) -> list[list[str]]:
        """The `muonscope …` command lines of a one-shot service or of a lasting one."""
        lines = self.command[2].splitlines() if self.command[:2] == ["sh", "-ec"] else [" ".join(self.command)]
        return [line.split() for line in lines if line.startswith("muonscope ")]


@cache
def services() -> dict[str, Service]:
    return {name: Service(name, interpolated(raw)) for name, raw in document()["services"].items()}


@cache
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def interpolated(value: Any) -> Any:
    """Replace `${NAME:-default}` by its default, as Compose does where nothing is set."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    if not isinstance(value, str):
        return value
    missing = [name for name, default in _VARIABLE.findall(value) if f"${{{name}:-" not in value]
    assert not missing, f"{missing} has no default: `docker compose up` would warn and go on with nothing"
    return _VARIABLE.sub(lambda found: found[2] or "", value)
