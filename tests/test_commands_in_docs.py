"""Every block of commands in the documents: which test types it, and that each command of ours would be understood."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from muonscope.cli.main import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = r"muonscope|make|curl|ray|pip|docker|kubectl|sbatch|deploy/\S+|\S*python"
COMMAND = re.compile(rf"(\w+=\S+ )*(\w+=\$\(|time )?({PROGRAMS})[ (]|export \w+=")
TYPED = "tests/integration/client/test_real_service.py::"
TYPED += "test_the_guides_commands_are_typed_as_they_are_printed_and_every_verb_answers_in_json"
OWN_CLUSTER = "tests/deploy/test_own_cluster.py::test_a_cluster_of_ones_own_trains_what_a_laptop_submits"
LAPTOP = "tests/integration/service/test_on_real_ray.py::test_a_laptops_job_trains_its_own_task_and_ends_by_its_verdict"
CURL = "tests/unit/service/test_documented_requests.py::test_the_curl_that_a_document_shows_queues_a_run"
COMPOSE = "tests/deploy/test_compose_processes.py::test_what_the_file_starts_trains_and_its_steps_are_in_postgresql"
UP = "tests/integration/service/test_on_real_ray.py::test_a_submitted_run_trains_and_its_record_is_complete"
BENCHMARK = "by hand: prints measured numbers; which tests it selects is looked at here"
# By document and the beginning of a block: the tests that type it or its like, or why none does.
PROOFS = {
    ("README.md", "make demo"): (".ci/run",),
    ("README.md", "make up"): (
        UP,
        "tests/integration/service/test_run_command.py::test_a_run_that_trains_ends_the_command_with_0",
        "tests/integration/workers/test_training.py::test_byte_gpt_learns_and_master_dies_of_a_high_initial_scale",
        "tests/unit/cli/test_experiment_verbs.py::test_an_experiment_of_ones_own_is_run_from_its_file_and_ends_by_its_worst_verdict",
        "tests/integration/service/test_on_real_ray.py::test_the_tutorial_ends_in_the_comparison_it_promises",
    ),
    ("README.md", "curl"): (CURL,),
    ("CONTRIBUTING.md", ".venv/bin/python -m pytest -m gpu"): ("by hand: it takes GPUs",),
    ("docs/benchmarks.md", "muonscope experiment run thirty-step --gpus"): ("by hand: it takes a GPU",),
    ("docs/benchmarks.md", "muonscope up &"): ("by hand: what it shows is the time it takes",),
    ("docs/benchmarks.md", "make bench"): (BENCHMARK,),
    ("docs/guides/alerts.md", "muonscope alert"): (TYPED,),
    ("docs/guides/bisect.md", "muonscope bisect"): (
        "by hand: twenty real releases take an hour",
        "tests/unit/cli/test_bisect_verb.py::test_the_release_in_which_the_verdict_changed_is_named",
    ),
    ("docs/guides/command-line.md", "muonscope up"): (TYPED, UP),
    ("docs/guides/containers.md", "deploy/secrets.sh"): (
        "tests/deploy/test_compose.py::test_the_script_draws_every_secret_once_and_users_tokens_of_the_right_form",
        COMPOSE,
    ),
    ("docs/guides/containers.md", "export MUONSCOPE_URL"): (COMPOSE,),
    ("docs/guides/deepspeed-releases.md", "PIP_FIND_LINKS"): (
        "tests/unit/workers/test_releases.py::test_the_command_installs_beforehand_and_says_in_words_what_cannot_be_had",
    ),
    ("docs/guides/kubernetes.md", "docker build"): (
        "by hand: there is no cluster",
        "tests/deploy/test_kubernetes.py::test_every_command_exists_and_every_variable_is_a_setting",
    ),
    ("docs/guides/kubernetes.md", "export MUONSCOPE_URL"): (COMPOSE,),
    ("docs/guides/monitoring.md", "pip install"): (
        "tests/faults/test_mlflow_mirror.py::"
        "test_a_mirror_that_is_killed_goes_on_and_mlflow_has_every_value_once",
    ),
    ("docs/guides/published-tables.md", "muonscope experiment run published"): (
        "by hand: its seven tables take minutes",
        "tests/distributed/test_published_numbers.py",
    ),
    ("docs/guides/ray-jobs.md", "ray job submit --address http://HEAD"): (OWN_CLUSTER,),
    ("docs/guides/ray-jobs.md", "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN"): (LAPTOP,),
    ("docs/guides/ray-jobs.md", 'ray job submit --address "$ADDRESS" -- muonscope show'): (LAPTOP,),
    ("docs/guides/ray-jobs.md", "MUONSCOPE_ALLOW_TASKS=laptop_task:build make up"): (LAPTOP,),
    ("docs/guides/ray-jobs.md", "export RAY_AUTH_MODE=token MUONSCOPE_URL"): (OWN_CLUSTER,),
    ("docs/guides/run-spec.md", "curl"): (CURL,),
    ("docs/guides/slurm.md", "export MUONSCOPE_HOME"): (
        "tests/deploy/test_slurm.py::"
        "test_a_run_from_the_login_node_trains_in_the_allocation_and_its_record_outlives_it",
    ),
    ("docs/security.md", "muonscope token"): (TYPED,),
    ("docs/security.md", "muonscope up --require-token"): (
        "tests/unit/cli/test_token_verbs.py::test_up_beyond_loopback_without_a_token_says_how_to_make_one",
    ),
    ("docs/tutorial.md", "make up"): (UP,),
    ("docs/tutorial.md", "master=$(muonscope submit"): (
        "tests/integration/service/test_on_real_ray.py::test_the_tutorial_ends_in_the_comparison_it_promises",
    ),
    ("docs/why-the-order-matters.md", "muonscope experiment run"): (
        "tests/integration/service/test_on_real_ray.py::test_six_orders_of_one_step_end_as_the_document_says",
    ),
}  # fmt: skip


@cache
def blocks() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Each block of commands: its document and its lines of commands, without what is said of them."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            lines = [re.split(r" +#| {2,}", line.strip())[0] for line in block.splitlines()]
            commands = tuple(line for line in lines if COMMAND.match(line + " "))
            # The picture of the tree, and of the ways in, begin as commands do.
            if commands and not re.search(r"[─├└]|^muon_core/", block, re.MULTILINE):
                found.append((str(document.relative_to(ROOT)), commands))
    return tuple(found)


@cache
def existing_tests() -> frozenset[str]:
    return frozenset(
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def _keys(document: str, commands: tuple[str, ...]) -> list[tuple[str, str]]:
    return [key for key in PROOFS if key[0] == document and commands[0].startswith(key[1])]


def test_every_block_of_commands_has_a_test_or_says_why_it_has_none() -> None:
    unproven = [(document, commands[0]) for document, commands in blocks() if not _keys(document, commands)]

    assert unproven == []
    used = {key for document, commands in blocks() for key in _keys(document, commands)}
    assert PROOFS.keys() - used == set()


def test_a_laptop_is_told_of_the_leave_that_its_task_needs_before_it_writes_one() -> None:
    guide = (ROOT / "docs" / "guides" / "ray-jobs.md").read_text(encoding="utf-8")

    assert 0 < guide.find("MUONSCOPE_ALLOW_TASKS=laptop_task:build make up") < guide.find("class Copying")


def test_every_test_that_is_to_prove_a_block_exists() -> None:
    named = {proof for proofs in PROOFS.values() for proof in proofs if not proof.startswith("by hand: ")}

    assert {proof for proof in named if proof not in existing_tests() and not (ROOT / proof).is_file()} == set()


def _ours() -> list[tuple[str, str]]:
    """Every command of ours in a block, also behind variables, in another command, or in parentheses."""
    words = re.compile(r"(?:^|-- |[;(] ?|&& |\w=\S+ |time )muonscope ((?:[^;&|()<>]|\[QUERY\])+)")
    return [
        (document, match[1].strip())
        for document, commands in blocks()
        for command in commands
        for match in words.finditer(command)
    ]


@pytest.mark.parametrize(("document", "words"), _ours())
def test_every_command_of_ours_is_understood_with_its_options(document: str, words: str) -> None:
    command: Any = typer.main.get_command(app)
    left = shlex.split(words.replace("[--follow]", "--follow").replace("RUN...", "RUN"))
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]

    # Reads them as the command would, and carries nothing out; what it cannot read ends it.
    command.make_context("muonscope", left)


def test_a_command_with_an_option_that_there_is_not_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_every_command_of_ours_is_understood_with_its_options("", "ls --surprise")


@pytest.mark.parametrize(
    "expression",
    [
        found
        for _, commands in blocks()
        for command in commands
        for found in re.findall(r"""make bench\S* ARGS="-k '?([^"']+)""", command)
    ],
)
def test_every_selection_of_benchmarks_selects_something(expression: str) -> None:
    names = [name for name in existing_tests() if name.startswith("tests/benchmarks/")]

    for word in re.findall(r"\w+", expression):
        assert word in ("and", "or", "not") or any(word in name for name in names), word
