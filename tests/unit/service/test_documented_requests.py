"""The requests that the documents show, sent as they stand."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from httpx import Client, Response

from muonscope.contract.run_spec import RunSpec

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "run-spec.md"
DOCUMENTS = (ROOT / "README.md", GUIDE)
ADDRESS = "http://127.0.0.1:8800"


def curls(document: Path) -> list[list[str]]:
    """Every curl command in a document's code blocks, as the shell would split it."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(block) for block in blocks if block.startswith("curl ")]


def send(words: list[str], client: Client) -> Response:
    """Send what curl would send."""
    name, value = words[words.index("-H") + 1].split(": ")
    (address,) = (word for word in words if word.startswith(ADDRESS))
    return client.post(address.removeprefix(ADDRESS), content=words[words.index("-d") + 1], headers={name: value})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_curl_that_a_document_shows_queues_a_run(document: Path, shared: Client) -> None:
    (words,) = curls(document)

    answer = send(words, shared)

    assert answer.status_code == 201, answer.text
    assert shared.get(f"/runs/{answer.json()['id']}").json()["name"] == "first-run"


def test_without_its_content_type_the_same_curl_is_refused(shared: Client) -> None:
    (words,) = curls(GUIDE)
    words[words.index("-H") + 1] = "Content-Type: application/x-www-form-urlencoded"

    assert send(words, shared).status_code == 415


def test_the_guides_two_forms_are_one_spec() -> None:
    yaml_form, *_ = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (words,) = curls(GUIDE)

    as_yaml = RunSpec.model_validate(yaml.safe_load(yaml_form))

    assert RunSpec.model_validate_json(words[words.index("-d") + 1]) == as_yaml


def test_the_page_of_all_requests_is_served(shared: Client) -> None:
    assert shared.get("/docs").status_code == 200
