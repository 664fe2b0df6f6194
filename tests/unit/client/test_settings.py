"""Where the client looks for the service."""

import json
import ssl
from pathlib import Path

import pytest

from muonscope.client import ClientSettings
from muonscope.client.settings import DEFAULT_URL, trust_for


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("MUONSCOPE_URL", raising=False)
    monkeypatch.setenv("MUONSCOPE_HOME", str(tmp_path))
    return tmp_path


def test_the_service_that_is_up_on_the_home_is_found(home: Path) -> None:
    (home / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:8123"}))

    settings = ClientSettings()

    assert settings.url == "http://127.0.0.1:8123"
    assert "url" not in settings.model_fields_set


def test_what_is_given_goes_before_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:8123"}))
    monkeypatch.setenv("MUONSCOPE_URL", "http://gpu.example:8800")

    assert ClientSettings().url == "http://gpu.example:8800"


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "half a docum"])
def test_without_an_address_it_is_the_usual_one(home: Path, text: str | None) -> None:
    if text is not None:
        (home / "address.json").write_text(text)

    assert ClientSettings().url == DEFAULT_URL


def test_plain_http_trusts_no_authority_and_tls_those_that_httpx_does() -> None:
    plain = trust_for("http://127.0.0.1:8800")

    assert isinstance(plain, ssl.SSLContext)
    assert (plain.verify_mode, plain.check_hostname, plain.cert_store_stats()["x509_ca"]) == (
        ssl.CERT_REQUIRED,
        True,
        0,
    )
    assert trust_for("https://gpu.example:8800") is True
