"""docker-compose.yml, the Dockerfile and what they mount, against the code: nothing here needs a Docker engine."""

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from service.settings import Settings
from service.store.tokens import TEXT as TOKEN
from tests.deploy.compose import ROOT, SERVICE_KEYS, Service, document, services
from tests.deploy.words import OURS, THEIRS, unknown_words
from workers.warm_pool import ray_start_environment

SECRETS = document()["secrets"]
VOLUMES = document()["volumes"]
every_service = pytest.mark.parametrize("service", services().values(), ids=list(services()))


@every_service
def test_a_service_has_only_keys_that_the_compose_specification_has(service: Service) -> None:
    assert set(service.raw) <= SERVICE_KEYS


def test_the_services_are_those_that_the_guide_promises() -> None:
    by_profile = {name: service.raw.get("profiles", []) for name, service in services().items()}

    assert by_profile == {
        "db": [], "migrate": [], "tokens": [], "controller": [], "ray-head": [], "ray-worker-gpu": ["gpu"],
        "ray-worker-cpu": ["cpu"], "prometheus": ["monitoring"], "grafana": ["monitoring"],
    }  # fmt: skip


@every_service
def test_what_a_service_waits_for_exists_and_can_become_so(service: Service) -> None:
    for name, condition in service.depends_on.items():
        awaited = services()[name]
        if condition == "service_healthy":
            assert awaited.health is not None
            assert awaited.raw["restart"] != "no"
        else:
            assert condition == "service_completed_successfully"
            assert awaited.raw["restart"] == "no"
        # A profile that is off would take what the service waits for with it.
        assert set(awaited.raw.get("profiles", [])) <= set(service.raw.get("profiles", []))


@every_service
def test_every_lasting_service_says_whether_it_is_well(service: Service) -> None:
    is_one_shot = service.raw["restart"] == "no"

    assert (service.health is None) == is_one_shot


@every_service
def test_nothing_but_the_controller_is_published_beyond_loopback(service: Service) -> None:
    beyond = [port for port in service.raw.get("ports", []) if not port.startswith("127.0.0.1:")]

    assert beyond == (["8800:8800"] if service.name == "controller" else [])


@every_service
def test_a_service_is_no_root_has_no_capability_and_a_pinned_image(service: Service) -> None:
    user, group = service.raw["user"].split(":")

    assert int(user) > 0
    assert group.isdigit()
    assert service.raw["cap_drop"] == ["ALL"]
    assert service.raw["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?(-[a-z0-9.]+)?", service.raw["image"])


@every_service
def test_every_variable_is_a_setting_that_somebody_reads(service: Service) -> None:
    assert set(service.environment) - OURS - THEIRS == set()


@every_service
def test_a_secret_is_a_mounted_file_and_never_a_variable(service: Service) -> None:
    words = [*service.environment.values(), *service.command]
    named = {name for word in words for name in re.findall(r"/run/secrets/(\w+)", word)}
    if service.name == "prometheus":
        named |= set(re.findall(r"/run/secrets/(\w+)", (ROOT / "deploy" / "prometheus.yml").read_text()))

    assert named == set(service.raw.get("secrets", []))
    assert named <= set(SECRETS)
    secret = re.compile(r"PASSWORD|TOKEN|KEY|SECRET")
    for name, value in service.environment.items():
        assert not secret.search(name) or value.startswith("/run/secrets/"), name
    assert not any("postgresql://" in word and re.search(r"://\w+:\w+@", word) for word in words)


@every_service
def test_what_a_service_mounts_is_there(service: Service) -> None:
    for mount in service.raw.get("volumes", []):
        source = mount.split(":")[0]
        assert (ROOT / source).exists() if source.startswith("./") else source in VOLUMES, mount
        assert not source.startswith("./") or mount.endswith(":ro")


def test_every_muonscope_command_is_a_verb_with_these_options() -> None:
    commands = [words for service in services().values() for words in service.muonscope_commands]
    assert len(commands) == 5
    for words in commands:
        assert unknown_words(words) == set()


def test_the_service_would_start_on_the_environment_that_the_controller_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for secret in SECRETS:
        (tmp_path / secret).write_text("secret")
    for name, value in services()["controller"].environment.items():
        monkeypatch.setenv(name, value.replace("/run/secrets", str(tmp_path)))
    settings = Settings()

    assert settings.effective_database_url == "postgresql://muonscope:secret@db:5432/muonscope"
    assert settings.is_token_needed
    assert "controller" in settings.answered_hosts
    # Retention deletes under its own home what the workers wrote: both are the same volume.
    homes = {mount for name in ("controller", "ray-head", "ray-worker-gpu", "ray-worker-cpu")
             for mount in services()[name].raw["volumes"]}  # fmt: skip
    assert homes == {f"state:{settings.workers_home}"}


@pytest.mark.parametrize("name", ["ray-worker-gpu", "ray-worker-cpu"])
def test_workers_are_kept_warm_and_want_rays_token(name: str) -> None:
    environment = services()[name].environment

    assert ray_start_environment().items() <= environment.items()
    assert environment["RAY_AUTH_MODE"] == services()["ray-head"].environment["RAY_AUTH_MODE"] == "token"


def test_every_ray_option_is_one_that_ray_has() -> None:
    for name in ("ray-head", "ray-worker-gpu", "ray-worker-cpu"):
        command = services()[name].command
        assert command[:2] == ["ray", "start"]
        assert unknown_words(command) == set()
        # The health check asks the agent on the port that it was given.
        assert "--dashboard-agent-listen-port=52365" in command


def test_the_script_draws_every_secret_once_and_users_tokens_of_the_right_form(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    script = ["sh", str(ROOT / "deploy" / "secrets.sh"), str(folder)]
    subprocess.run(script, check=True, capture_output=True)
    drawn = {path.name: path.read_text().strip() for path in folder.iterdir()}
    again = subprocess.run(script, check=True, capture_output=True, text=True)

    assert {name: f"deploy/secrets/{name}" for name in drawn} == {
        name: about["file"] for name, about in SECRETS.items()
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: path.read_text().strip() for path in folder.iterdir()} == drawn
    assert again.stdout.count("stays") == len(drawn)
    assert len(set(drawn.values())) == len(drawn)
    assert {name for name, text in drawn.items() if TOKEN.fullmatch(text)} == {
        "admin_token", "jobs_token", "prometheus_token",
    }  # fmt: skip
    assert all(len(text.removeprefix("msc_")) == 64 for text in drawn.values())


def test_secrets_get_into_neither_the_repository_nor_an_image() -> None:
    assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    let_in = {line[1:] for line in ignored if line.startswith("!")}

    assert ignored[0] == "*"
    assert "deploy" not in let_in
    assert all((ROOT / path).exists() for path in let_in)
    # What hatchling reads to build the wheel.
    assert {"pyproject.toml", "requirements.lock", "hatch_build.py", "README.md", "LICENSE"} <= let_in


def test_the_image_is_built_from_the_lock_file_runs_as_the_services_user_and_has_their_paths() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    (user,) = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    installs = re.findall(r"pip (?:install|wheel)[^\n]*", text.replace("\\\n", " "))

    assert len(set(images)) == 1
    assert all(re.fullmatch(r"python:3\.1[123]\.\d+-slim-\w+", image) for image in images)
    assert {service.raw["user"] for service in services().values() if service.is_ours} == {user}
    assert len(installs) == 3
    assert all("requirements.lock" in line for line in [*installs[1:], "PIP_CONSTRAINT=/source/requirements.lock"])
    assert f"MUONSCOPE_HOME={services()['controller'].environment['MUONSCOPE_WORKERS_HOME']}" in text


@pytest.mark.parametrize("profile", ["gpu", "cpu", "monitoring"])
def test_composes_own_reader_takes_the_file_where_it_is_installed(profile: str, tmp_path: Path) -> None:
    compose = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*compose, "version"], capture_output=True).returncode != 0:
        pytest.skip("Docker Compose is not installed")

    done = subprocess.run(
        [*compose, "--file", str(ROOT / "docker-compose.yml"), "--profile", profile, "config", "--quiet"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


def test_prometheus_and_grafana_find_what_they_are_to_show() -> None:
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    sources = yaml.safe_load((ROOT / "deploy" / "grafana" / "datasources.yml").read_text())
    boards = yaml.safe_load((ROOT / "deploy" / "grafana" / "dashboards.yml").read_text())
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in services()["grafana"].raw["volumes"])

    assert scrape["scrape_configs"][0]["static_configs"] == [{"targets": ["controller:8800"]}]
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    assert mounts["./docs/grafana"] == boards["providers"][0]["options"]["path"]
    assert (ROOT / "docs" / "grafana" / "muonscope.json").exists()
