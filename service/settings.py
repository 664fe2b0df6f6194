"""Where and how the service runs. Environment variables `MUONSCOPE_…`; what to train is the RunSpec's matter."""

import ipaddress
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote, urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

CommaSeparated = Annotated[tuple[str, ...], NoDecode]


def sqlite_url(path: Path) -> str:
    """Return the database URL of a SQLite file, whatever characters its path has."""
    return f"sqlite:///{quote(str(path), safe=' +/')}"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's alone; a name counts only where it is `localhost`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_secret(file: Path, field: str) -> str:
    """Return what a secret's file holds, without the line's end.

    Raises:
        ValueError: there is nothing in it that this user may read.
    """
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}={file} cannot be read: {error}; give a file that this user may read") from error
    if not secret:
        raise ValueError(f"{field}={file} is empty; write the secret into it")
    return secret


class Settings(BaseSettings):
    """Read once at the start; nothing else reads the environment."""

    model_config = SettingsConfigDict(
        env_prefix="MUONSCOPE_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".muonscope")
    """The folder of all state: database, Ray's session, files; with `make up` and `make demo` it is `./.muonscope`."""
    host: str = Field("127.0.0.1", min_length=1)
    """The address to listen on. Anything but loopback is reachable by others."""
    port: int = Field(8800, ge=0, le=65535)
    """0 takes a free one."""
    database_url: str = ""
    """`sqlite:///path` or `postgresql://…`; empty is `muonscope.db` under `home`."""
    database_password_file: Path | None = None
    """The file that holds the password of the user whom `database_url`, of a PostgreSQL, names without one."""
    ray_address: str | None = None
    """URL of a Ray cluster's dashboard and Jobs API, `http://host:8265`; null starts a local Ray."""
    ray_token_file: Path | None = None
    """The file that holds the token of a Ray with `RAY_AUTH_MODE=token`; the local Ray makes its own."""
    workers_home: Path | None = None
    """The folder, shared by all nodes of `ray_address`, for checkpoints and logs; null is the workers' own
    `MUONSCOPE_HOME`. The local Ray's workers use `home`."""
    gpus: int | None = Field(None, ge=0, le=4096)
    """GPUs of the local Ray; null takes the real ones, or 4 logical ones where there are none."""
    cluster_max_gpus: float | None = Field(None, gt=0, le=1_000_000)
    """GPUs that `ray_address` may come to have: runs up to that wait for workers; null takes what has joined."""
    advertise_url: str | None = None
    """How worker groups reach this service; null is the address it listens on."""
    allowed_hosts: CommaSeparated = ()
    """Further names this service answers to in the Host header; `*` answers to all."""
    allow_tasks: CommaSeparated = ()
    """The `module:function` tasks that a run may name, beside the built-in ones."""

    heartbeat_s: float = Field(2.0, gt=0, le=3600)
    """How often a worker group gives a sign of life."""
    lease_s: float = Field(30.0, gt=0, le=86400)
    """An attempt that is silent for longer, and whose Ray job is gone, is lost."""
    recording_lease_s: float = Field(3600.0, gt=0, le=7 * 86400)
    """A script that records itself and is silent for longer is taken for gone, and its record is closed."""
    stall_limit_s: float = Field(300.0, gt=0, le=86400)
    """A rank without a new step for this long ends its attempt as stalled."""
    start_limit_s: float = Field(300.0, gt=0, le=86400)
    """An attempt that has not enrolled after this long is ended."""
    stop_grace_s: float = Field(4.0, ge=0, le=600)
    """How long a stopped attempt may take to report its outcome before it is closed without one."""
    tick_s: float = Field(1.0, gt=0, le=60)
    """The longest pause between two looks at queue and cluster; changes wake the controller at once."""
    aging_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """A queued run gains one point of priority for each such span it has waited."""
    max_attempts: int = Field(3, ge=1, le=100)
    """Attempts a run may take where the infrastructure, not the run, is at fault."""
    retry_backoff_s: float = Field(1.0, ge=0, le=3600)
    """The pause before the second attempt; it doubles with each further one."""

    retention_days: float | None = Field(None, gt=0)
    """Runs that ended longer ago are deleted, with record, checkpoints and logs; null keeps them all."""

    alert_networks: CommaSeparated = ()
    """Private networks (`10.1.0.0/16`) that webhooks may reach; without them only public addresses."""
    alert_allow_http: bool = False
    """Webhooks may go to `http://` addresses, where anyone on the way can read them."""
    alert_key_file: Path | None = None
    """The key that webhook secrets are derived from, shared by all controllers of one database; null is `alert.key`
    under `home`, made when first needed."""
    alert_attempts: int = Field(12, ge=1, le=100)
    """How often a webhook is sent before it is given up."""
    alert_backoff_s: float = Field(5.0, gt=0, le=3600)
    """The pause after a webhook that was not taken; it doubles with each further one, up to an hour."""
    alert_timeout_s: float = Field(10.0, gt=0, le=60)
    """How long a webhook's receiver may take to answer."""
    mlflow_tracking_uri: str | None = None
    """Runs are mirrored to this MLflow, `http://host:5000` or what else its client takes; needs `muonscope[mlflow]`."""
    mlflow_experiment: str = Field("muonscope", min_length=1, max_length=256)
    """The MLflow experiment that mirrored runs are in."""

    max_body_bytes: int = Field(1024 * 1024, ge=1024)
    """The largest request body, telemetry aside."""
    max_telemetry_bytes: int = Field(64 * 1024 * 1024, ge=1024)
    """The largest telemetry batch."""
    body_timeout_s: float = Field(20.0, gt=0)
    """How long a request body may take to arrive."""
    max_streams: int = Field(256, ge=1)
    """Live event streams served at once."""

    require_token: bool = False
    """Whether a token is needed on loopback too, as behind a reverse proxy; beyond loopback it always is."""
    submit_rate_per_s: float = Field(100.0, gt=0)
    """How many requests a second that create work one token, or one address without a token, may go on sending."""
    submit_burst: int = Field(10_000, ge=1)
    """How many of them may come at once."""

    @field_validator("allow_tasks", "allowed_hosts", "alert_networks", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("alert_networks", mode="after")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            # Its own message names the value and what is wrong with it.
            ip_network(network)
        return value

    @field_validator("mlflow_tracking_uri", mode="after")
    @classmethod
    def _has_its_client(cls, value: str | None) -> str | None:
        if value and find_spec("mlflow") is None:
            raise ValueError("MLflow's client is not installed; pip install 'muonscope[mlflow]', or leave this unset")
        return value or None

    @field_validator("database_url", mode="after")
    @classmethod
    def _names_a_store(cls, value: str) -> str:
        scheme, slashes, rest = value.partition("://")
        is_file = scheme == "sqlite" and rest.startswith("/") and rest.strip("/") not in ("", ":memory:")
        is_server = scheme in ("postgresql", "postgres", "postgresql+psycopg")
        # The value itself may hold a password.
        if value and not (slashes and (is_file or is_server)):
            raise ValueError("is neither sqlite:///path nor postgresql://user@host/name")
        return value

    @field_validator("ray_address", "advertise_url", mode="after")
    @classmethod
    def _is_a_web_address(cls, value: str | None) -> str | None:
        if not value:
            return None
        url = urlsplit(value)
        # A port that is no number raises, and says so.
        if url.scheme not in ("http", "https") or not url.hostname or url.port == 0:
            raise ValueError(f"{value} is no web address; give http://host:port")
        return value

    @field_validator("home", mode="after")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"lease_s={self.lease_s} is less than three heartbeats of {self.heartbeat_s} s; raise lease_s"
            )
        return self

    @model_validator(mode="after")
    def _password_has_its_place(self) -> Self:
        if self.database_password_file is not None:
            url = urlsplit(self.database_url)
            if not url.scheme.startswith("postgresql") or not url.username or url.password is not None:
                raise ValueError(
                    "database_password_file needs a database_url of the form postgresql://user@host/name, without a "
                    "password of its own"
                )
            _read_secret(self.database_password_file, "database_password_file")
        return self

    @property
    def answered_hosts(self) -> frozenset[str]:
        """The names in the Host header that are ours, beside loopback's."""
        advertised = urlsplit(self.advertise_url or "").hostname
        own = {self.host} - {"0.0.0.0", "::"}
        return frozenset({*own, *self.allowed_hosts, *([advertised] if advertised else [])})

    @property
    def is_token_needed(self) -> bool:
        """Whether others can reach this service, or someone asked for tokens all the same."""
        advertised = urlsplit(self.advertise_url or "").hostname
        return self.require_token or not all(is_loopback(name) for name in (self.host, advertised) if name)

    @property
    def effective_workers_home(self) -> Path | None:
        return self.home if self.ray_address is None else self.workers_home

    @property
    def kept_files_home(self) -> Path:
        """Where checkpoints and logs lie, as far as this machine can know."""
        return self.effective_workers_home or self.home

    @property
    def database_address(self) -> str:
        """The database's URL as it was given: it stays when the password in its file is replaced."""
        return self.database_url or sqlite_url(self.home / "muonscope.db")

    @property
    def effective_database_url(self) -> str:
        """The URL to connect with, the password of its file in it."""
        if self.database_password_file is None:
            return self.database_address
        password = _read_secret(self.database_password_file, "database_password_file")
        before, _, after = self.database_address.partition("@")
        return f"{before}:{quote(password, safe='')}@{after}"

    @property
    def effective_alert_key_file(self) -> Path:
        return self.alert_key_file or self.home / "alert.key"

    @property
    def effective_advertise_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return self.advertise_url or f"http://{host}:{self.port}"
