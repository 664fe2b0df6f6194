"""deploy/kubernetes against the code and against itself: what names what, and that it exists."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests.deploy.compose import ROOT, services
from tests.deploy.words import OURS, THEIRS, unknown_words
from workers.warm_pool import ray_start_environment

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS = [
    each for file in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((FOLDER / file).read_text()) if each
]
# Drawn by deploy/secrets.sh and made from its folder, as the guide says.
SECRETS = {"muonscope": set(services()["tokens"].raw["secrets"]) | {"grafana_password", "ray_token"},
           "muonscope-ray-token": {"auth_token"}}  # fmt: skip


def objects(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod's spec, with a name for it."""
    for kind in ("Deployment", "StatefulSet"):
        for name, each in objects(kind).items():
            yield name, each["spec"]["template"]["spec"]
    for name, cluster in objects("RayCluster").items():
        groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
        for group in groups:
            yield f"{name}-{group.get('groupName', 'head')}", group["template"]["spec"]


PODS = dict(pods())
CONTAINERS = {
    f"{pod}/{one['name']}": (spec, one)
    for pod, spec in PODS.items()
    for one in (*spec.get("initContainers", ()), *spec["containers"])
}

every_container = pytest.mark.parametrize(("pod", "container"), CONTAINERS.values(), ids=list(CONTAINERS))


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", ())}


def test_every_manifest_is_listed_and_every_listed_one_is_there() -> None:
    found = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}

    assert set(KUSTOMIZATION["resources"]) == found
    assert set(PODS) == {"controller", "database", "muonscope-head", "muonscope-gpu"}


@every_container
def test_a_container_is_no_root_has_no_capability_and_a_pinned_image(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    composed = {service.raw["image"]: service.raw["user"] for service in services().values()}
    user = pod["securityContext"]
    assert composed[container["image"]] == f"{user['runAsUser']}:{user['runAsGroup']}"


@every_container
def test_every_command_exists_and_every_variable_is_a_setting(pod: dict[str, Any], container: dict[str, Any]) -> None:
    command = container.get("command", [])

    assert not command or unknown_words(command) == set()
    assert set(environment(container)) - OURS - THEIRS == set()


@every_container
def test_a_secret_is_a_file_that_is_mounted_from_a_secret_that_has_it(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    files = set()
    for mount in container.get("volumeMounts", ()):
        secret = volumes.get(mount["name"], {}).get("secret")
        if secret is not None:
            assert mount["readOnly"] is True
            given = {item["key"]: item["path"] for item in secret.get("items", ())} or {
                key: key for key in SECRETS[secret["secretName"]]
            }
            assert set(given) <= SECRETS[secret["secretName"]]
            files |= {f"{mount['mountPath']}/{path}" for path in given.values()}
    words = [*environment(container).values(), *container.get("command", ())]

    assert {word for word in words if word.startswith("/run/secrets/")} <= files
    for name, value in environment(container).items():
        assert not re.search("PASSWORD|TOKEN|SECRET", name) or value in files, name


def test_no_variable_that_kubernetes_adds_by_itself_is_a_setting_of_ours() -> None:
    # One Service called `muonscope` would set MUONSCOPE_PORT to an address.
    services_here = {*objects("Service"), "muonscope-head-svc"}
    added = {f"{name.upper().replace('-', '_')}{tail}" for name in services_here
             for tail in ("_PORT", "_SERVICE_HOST", "_SERVICE_PORT", "_SERVICE_PORT_HTTP")}  # fmt: skip

    assert added & OURS == set()
    assert all(pod["enableServiceLinks"] is False for pod in PODS.values())


def test_addresses_lead_to_services_that_select_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = {name: each["spec"]["selector"] for name, each in objects("Service").items()}
    labels = [each["spec"]["template"]["metadata"]["labels"] for kind in ("Deployment", "StatefulSet")
              for each in objects(kind).values()]  # fmt: skip
    for each in (*objects("Deployment").values(), *objects("StatefulSet").values()):
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
    assert all(any(selector.items() <= given.items() for given in labels) for selector in selected.values())

    (cluster,) = objects("RayCluster")
    names = {*selected, f"{cluster}-head-svc"}
    for _, container in CONTAINERS.values():
        for value in environment(container).values():
            found = re.match(r"(?:http|postgresql)://(?:\w+@)?([\w-]+):", value)
            assert found is None or found[1] in names, value


def test_claims_exist_and_the_state_may_be_written_by_many_nodes() -> None:
    claims = objects("PersistentVolumeClaim")
    named = {volume["persistentVolumeClaim"]["claimName"] for pod in PODS.values() for volume in pod["volumes"]
             if "persistentVolumeClaim" in volume}  # fmt: skip

    assert named == set(claims) == {"state"}
    assert claims["state"]["spec"]["accessModes"] == ["ReadWriteMany"]
    places = {mount["mountPath"] for _, container in CONTAINERS.values() for mount in container.get("volumeMounts", ())
              if mount["name"] == "state"}  # fmt: skip
    assert places == {environment(CONTAINERS["controller/controller"][1])["MUONSCOPE_WORKERS_HOME"]}


def test_the_service_would_start_on_the_environment_of_the_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "secret").write_text("secret")
    for name, value in environment(CONTAINERS["controller/controller"][1]).items():
        monkeypatch.setenv(name, str(tmp_path / "secret") if value.startswith("/run/secrets/") else value)
    settings = Settings()

    assert settings.is_token_needed
    assert settings.effective_database_url == "postgresql://muonscope:secret@database:5432/muonscope"


def test_a_new_version_does_not_wait_for_a_pod_that_stands_by_to_be_ready() -> None:
    # While the old one leads, the new one answers 503: a rolling update would wait for it for ever.
    assert objects("Deployment")["controller"]["spec"].get("strategy") == {"type": "Recreate"}


def test_ray_has_our_release_wants_a_token_and_keeps_its_workers_warm() -> None:
    (cluster,) = objects("RayCluster").values()
    lock = (ROOT / "requirements.lock").read_text()

    assert f"\nray=={cluster['spec']['rayVersion']}\n" in lock
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "muonscope-ray-token"}
    assert ray_start_environment().items() <= environment(CONTAINERS["muonscope-gpu/ray-worker"][1]).items()
    options = {
        f"--{name}"
        for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"])
        for name in group["rayStartParams"]
    }
    assert unknown_words(["ray", "start", *options]) == set()


def test_what_is_no_command_of_ours_is_found() -> None:
    assert unknown_words(["muonscope", "db", "upgrade"]) == set()
    assert unknown_words(["muonscope", "db", "upgarde"]) == {"muonscope db upgarde"}
    assert unknown_words(["muonscope", "up", "--prot=1"]) == {"--prot"}
    assert unknown_words(["ray", "start", "--haed"]) == {"--haed"}
