"""Where the client looks for the service."""

import json
import ssl
from pathlib import Path

import pytest

from muonscope.client import ClientSettings
from muonscope.client.settings import DEFAULT_URL, request_headers, trust_for
from muonscope.errors import MuonscopeError


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


@pytest.mark.parametrize("text", ["msc_abc\n", " msc_abc ", "msc_abc"])
def test_a_token_is_sent_without_what_surrounds_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_TOKEN", text)

    assert request_headers(ClientSettings(), None)["Authorization"] == "Bearer msc_abc"
    assert request_headers(ClientSettings(), text)["Authorization"] == "Bearer msc_abc"
    assert "Authorization" not in request_headers(ClientSettings(), "")


@pytest.mark.parametrize("text", ["msc_\xe9", "msc_a\nmsc_b"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(MuonscopeError, match="a character that no token has") as refused:
        request_headers(ClientSettings(), text)

    assert "msc_" not in str(refused.value)
