import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.serve import AddressInUse, bind
from service.settings import Settings


def test_the_defaults_are_loopback_and_a_file_under_home(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert (settings.host, settings.port) == ("127.0.0.1", 8800)
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/muonscope.db"
    assert settings.effective_advertise_url == "http://127.0.0.1:8800"


def test_the_environment_says_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_PORT", "9000")
    monkeypatch.setenv("MUONSCOPE_ALLOW_TASKS", "a.b:c, d:e")
    settings = Settings()
    assert settings.port == 9000
    assert settings.allow_tasks == ("a.b:c", "d:e")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8800"), ("::", "http://[::1]:8800"), ("10.1.2.3", "http://10.1.2.3:8800")],
)
def test_workers_reach_us_where_we_listen(host: str, url: str) -> None:
    assert Settings(host=host).effective_advertise_url == url


def test_an_advertised_name_is_one_we_answer_to() -> None:
    assert "gpu.example" in Settings(advertise_url="https://gpu.example:443").answered_hosts


@pytest.mark.parametrize("bad", [{"port": 70_000}, {"gpus": -1}, {"lease_s": 3.0, "heartbeat_s": 2.0}, {"nope": 1}])
def test_a_bad_setting_is_refused_at_construction(bad: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValidationError):
        Settings(**bad)


def test_no_host_is_no_way_to_listen_on_every_address_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_HOST", "")
    with pytest.raises(ValueError, match="host"):
        Settings()
    # Counter-test: every address, said so, is listened on, and asks for a token.
    assert Settings(host="0.0.0.0").is_token_needed


def test_an_empty_address_of_ray_starts_a_local_one_and_what_is_no_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUONSCOPE_RAY_ADDRESS", "")
    assert Settings().ray_address is None
    for wrong in ("ray://head:10001", "head:8265", "http://", "http://head:port"):
        with pytest.raises(ValueError, match="ray_address"):
            Settings(ray_address=wrong)
    assert Settings(ray_address="http://head:8265").ray_address == "http://head:8265"


def test_an_advertised_address_without_a_scheme_hides_no_need_of_a_token() -> None:
    # Its host would be read as none, and the service as one that nobody else reaches.
    with pytest.raises(ValueError, match="advertise_url"):
        Settings(advertise_url="controller:8800")
    assert Settings(advertise_url="http://controller:8800").is_token_needed


@pytest.mark.parametrize("aging", ["inf", "nan"])
def test_an_aging_that_ranks_nothing_is_refused(aging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUONSCOPE_AGING_S", aging)
    with pytest.raises(ValueError, match="aging_s"):
        Settings()


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressInUse, match="cannot listen on"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_the_databases_password_comes_from_its_file_and_is_no_part_of_its_address(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/word:1\n")
    settings = Settings(database_url="postgresql://muon@db:5432/muonscope", database_password_file=file)

    assert settings.effective_database_url == "postgresql://muon:p%40ss%2Fword%3A1@db:5432/muonscope"
    assert settings.database_address == "postgresql://muon@db:5432/muonscope"
    file.write_text("replaced")
    assert settings.effective_database_url == "postgresql://muon:replaced@db:5432/muonscope"


@pytest.mark.parametrize("url", ["", "sqlite:///a.db", "postgresql://db/muonscope", "postgresql://muon:pass@db/name"])
def test_a_password_file_without_a_place_for_the_password_is_refused(tmp_path: Path, url: str) -> None:
    file = tmp_path / "password"
    file.write_text("secret")

    with pytest.raises(ValidationError, match="postgresql://user@host/name"):
        Settings(database_url=url, database_password_file=file)


@pytest.mark.parametrize(("text", "reason"), [(None, "cannot be read"), ("\n", "is empty")])
def test_a_password_file_that_gives_none_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ValidationError, match=reason):
        Settings(database_url="postgresql://muon@db/muonscope", database_password_file=file)
