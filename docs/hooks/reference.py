"""The reference pages, made from the code whenever the site is built: commands, settings, requests, spec, client.

MkDocs calls `on_files`; each page is a function of the code alone, so none can be older than it.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined


def commands() -> str:
    """Every verb with its arguments and options."""
    from muonscope.cli.main import app

    lines = ["# Commands", "", "Every verb of `muonscope`, as `muonscope VERB --help` prints it.", ""]
    for path, command in _verbs(typer.main.get_command(app), ("muonscope",)):
        lines += [f"## {' '.join(path[1:])}", "", (command.help or "").strip(), ""]
        lines += ["| | |", "|---|---|"]
        context = click.Context(command, info_name=" ".join(path))
        for parameter in command.get_params(context):
            lines.append(f"| `{_usage(parameter)}` | {_cell(getattr(parameter, 'help', None) or '')} |")
        lines.append("")
    return "\n".join(lines)


def settings() -> str:
    """Every setting of the service and of the client."""
    from muonscope.client import ClientSettings
    from service.settings import Settings

    lines = ["# Settings", "", "Read from the environment; [what they are for](../guides/settings.md).", ""]
    for title, model in (("The service", Settings), ("Client and command line", ClientSettings)):
        lines += [f"## {title}", "", "| variable | default | means |", "|---|---|---|"]
        for name, field in model.model_fields.items():
            plain = field.default is not PydanticUndefined and field.default is not None
            default = f"`{field.default}`" if plain else ""
            lines.append(f"| `MUONSCOPE_{name.upper()}` | {default} | {_cell(field.description or '')} |")
        lines.append("")
    return "\n".join(lines)


def requests() -> str:
    """Every request, with its parameters and answers."""
    from service.app import create_app
    from service.settings import Settings

    document = create_app(Settings()).openapi()
    lines = ["# Requests", "", "A running service shows the same at `/docs`, to try.", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [f"## {method.upper()} {path}", "", operation.get("summary", ""), ""]
            lines += [operation["description"], ""] if operation.get("description") else []
            given = operation.get("parameters", [])
            lines += ["| parameter | in | means |", "|---|---|---|"] if given else []
            for each in given:
                lines.append(f"| `{each['name']}` | {each['in']} | {_cell(each.get('description', ''))} |")
            answers = ", ".join(f"`{code}`" for code in operation["responses"])
            lines += ["", f"Answers: {answers}.", ""]
    return "\n".join(lines)


def spec() -> str:
    """Every field of the run spec, level by level."""
    from muonscope.contract.run_spec import RunSpec

    schema = RunSpec.model_json_schema()
    lines = ["# Fields of the run spec", "", "`muonscope schema` prints the same for editors.", ""]
    for name, model in (("RunSpec", schema), *schema["$defs"].items()):
        if "properties" not in model:
            continue
        lines += [f"## {name}", "", _cell(model.get("description", "")), ""]
        lines += ["| field | default | means |", "|---|---|---|"]
        for field, about in model["properties"].items():
            default = f"`{about['default']}`" if "default" in about else ""
            lines.append(f"| `{field}` | {_cell(default)} | {_cell(about.get('description', ''))} |")
        lines.append("")
    return "\n".join(lines)


def python() -> str:
    """What `import muonscope` and `import muon_core` offer."""
    import muon_core
    import muonscope

    lines = ["# Python", ""]
    for package in (muonscope, muon_core):
        lines += [f"## {package.__name__}", ""]
        for name in package.__all__:
            found = getattr(package, name)
            text = inspect.getdoc(found) or ""
            if inspect.isfunction(found) or inspect.isclass(found):
                lines += [f"### {name}", "", "```text", text, "```", ""]
    return "\n".join(lines)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/commands.md": commands,
    "reference/settings.md": settings,
    "reference/requests.md": requests,
    "reference/spec.md": spec,
    "reference/python.md": python,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def _verbs(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from _verbs(each, (*path, name))


def _usage(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "option":
        return ", ".join(parameter.opts)
    return getattr(parameter, "metavar", None) or str(parameter.name).upper()


def _cell(text: Any) -> str:
    # A table's cell is one line, and angle brackets in it are no tags.
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
