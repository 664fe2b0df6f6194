"""Command lines of the files below deploy/, held against the commands there are."""

import typer
from click import Command

from muonscope.cli.main import app
from muonscope.client import ClientSettings
from service.settings import Settings
from workers.warm_pool import ray_start_environment

OURS = frozenset(f"MUONSCOPE_{name.upper()}" for name in (*Settings.model_fields, *ClientSettings.model_fields))
# What Ray, PostgreSQL, Grafana and the numerical libraries read.
THEIRS = frozenset(
    {
        "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_STOP_WAIT_TIME_S", "DS_ACCELERATOR", "OMP_NUM_THREADS",
        "TORCHDYNAMO_DISABLE", "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD_FILE", "POSTGRES_INITDB_ARGS",
        "PGDATA", "GF_SECURITY_ADMIN_PASSWORD__FILE", "GF_ANALYTICS_REPORTING_ENABLED", "GF_USERS_ALLOW_SIGN_UP",
    }
) | set(ray_start_environment())  # fmt: skip


def unknown_words(command: list[str]) -> set[str]:
    """Return the options of a `muonscope …` or `ray start …` command line that the command does not have.

    A verb that is none is its own answer.
    """
    verb, rest = _verb(command)
    if verb is None:
        return {" ".join(command)}
    known = {option for parameter in verb.params for option in parameter.opts}
    return {word.split("=")[0] for word in rest if word.startswith("-")} - known


def _verb(command: list[str]) -> tuple[Command | None, list[str]]:
    if command[:2] == ["ray", "start"]:
        from ray.scripts.scripts import start

        return start, command[2:]
    if command[:2] == ["ray", "list"]:
        from ray.util.state.state_cli import ray_list

        return ray_list, command[2:]
    if command[0] != "muonscope":
        return None, command
    found: Command = typer.main.get_command(app)
    rest = command[1:]
    while hasattr(found, "commands"):
        if not rest or rest[0] not in found.commands:
            return None, command
        found = found.commands[rest.pop(0)]
    return found, rest
