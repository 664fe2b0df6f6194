"""Webhooks at the socket: where one goes, where none goes, and how one is signed."""

import asyncio
import base64
import hashlib
import hmac
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from service.errors import InvalidInput
from service.settings import Settings
from service.webhooks import MAX_RESPONSE_BYTES, Answer, Sender, SigningKey, check_url, may_reach, shown_url


@contextmanager
def receiving(code: int = 200, *, text: bytes = b"", wait_s: float = 0.0, **headers: str) -> Iterator[Any]:
    """Serve every request with one answer; the server's `seen` are (path, Host)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            server.seen.append((self.path, self.headers["Host"]))  # type: ignore[attr-defined]
            is_over.wait(wait_s)
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            try:
                self.wfile.write(text)
            except OSError:
                self.close_connection = True

        do_GET = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the test's output to itself."""

    is_over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Names:
    """A resolver that answers differently each time it is asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers[min(len(self.asked), len(self._answers)) - 1]


def settings(tmp_path: Path, **overrides: Any) -> Settings:
    values: dict[str, Any] = {"alert_allow_http": True, "alert_networks": "127.0.0.0/8", **overrides}
    return Settings(home=tmp_path, **values)


def send(sender: Sender, url: str) -> Answer:
    return asyncio.run(sender.send(url, b"{}", {"webhook-id": "m"}))


# -- where a message goes --------------------------------------------------------------------------------------------


def test_a_message_goes_to_the_address_that_was_checked_under_the_hosts_name(tmp_path: Path) -> None:
    names = Names(["127.0.0.1"])
    with receiving(204) as server:
        answer = send(Sender(settings(tmp_path), resolver=names), f"http://hooks.example:{server.server_port}/a?b=c")

    assert answer == Answer(204, "", None)
    assert server.seen == [("/a?b=c", f"hooks.example:{server.server_port}")]
    assert names.asked == ["hooks.example"]


def test_a_name_that_leads_elsewhere_the_second_time_is_not_asked_a_second_time(tmp_path: Path) -> None:
    allowed = settings(tmp_path, alert_networks="127.0.0.2/32")
    with receiving() as server:
        names = Names(["127.0.0.2"], ["127.0.0.1"])
        answer = send(Sender(allowed, resolver=names), f"http://hooks.example:{server.server_port}/")

    # The receiver listens on 127.0.0.1 alone: whoever resolved again would have reached it.
    assert len(names.asked) == 1
    assert server.seen == []
    assert "ConnectError" in str(answer.error)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["::ffff:127.0.0.1"], []])
def test_a_name_that_leads_to_a_private_address_too_is_not_connected_to(addresses: list[str], tmp_path: Path) -> None:
    with receiving() as server:
        sender = Sender(settings(tmp_path, alert_networks=""), resolver=Names(addresses))
        answer = send(sender, f"http://hooks.example:{server.server_port}/")

    assert server.seen == []
    assert "hooks.example" in str(answer.error)


def test_the_systems_own_spellings_of_loopback_are_not_connected_to(tmp_path: Path) -> None:
    with receiving() as server:
        for host in ("localhost", "127.1", "2130706433", "0x7f000001"):
            answer = send(Sender(settings(tmp_path, alert_networks="")), f"http://{host}:{server.server_port}/")
            assert answer.code is None, host
            assert "not public" in str(answer.error), host

    assert server.seen == []


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with receiving() as inner, receiving(307, Location=f"http://127.0.0.1:{inner.server_port}/metadata") as outer:
        answer = send(Sender(settings(tmp_path)), f"http://127.0.0.1:{outer.server_port}/")

    assert inner.seen == []
    assert answer.code == 307
    assert "redirect" in str(answer.error)


def test_a_slow_receiver_is_given_up_in_time(tmp_path: Path) -> None:
    with receiving(wait_s=120) as server:
        began = time.monotonic()
        answer = send(Sender(settings(tmp_path, alert_timeout_s=0.3)), f"http://127.0.0.1:{server.server_port}/")

    assert time.monotonic() - began < 60
    assert answer == Answer(error="no answer within 0.3 s")


def test_a_long_answer_is_kept_by_its_beginning(tmp_path: Path) -> None:
    with receiving(400, text=b"x" * 5_000_000) as server:
        answer = send(Sender(settings(tmp_path)), f"http://127.0.0.1:{server.server_port}/")

    assert answer.text == "x" * MAX_RESPONSE_BYTES
    assert answer.error == "the receiver refused it: 400"


def test_the_environments_proxy_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with receiving() as server:
        answer = send(Sender(settings(tmp_path)), f"http://127.0.0.1:{server.server_port}/")

    assert answer.code == 200


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "100.100.100.200", "168.63.129.16", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
     "::", "::1", "fe80::1",
     "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:10.0.0.1", "::10.0.0.1",
     "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1"],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not may_reach(ip_address(address), ())


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_a_public_address_is_not_refused(address: str) -> None:
    assert may_reach(ip_address(address), ())


def test_a_network_that_is_listed_may_be_reached_and_its_neighbour_not() -> None:
    assert may_reach(ip_address("10.1.0.7"), ("10.1.0.0/16",))
    assert may_reach(ip_address("::ffff:10.1.0.7"), ("10.1.0.0/16",))
    assert not may_reach(ip_address("10.2.0.7"), ("10.1.0.0/16",))


# -- what is refused at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example/", "ftp://hooks.example/", "file:///etc/passwd", "hooks.example", "https://", "https:///x",
     "https://ann:secret@hooks.example/", "https://hooks.example/#here", "https://127.0.0.1/", "https://[::1]/",
     "https://169.254.169.254/latest", "https://hooks.example:99999/", "https://exa mple/", "javascript:alert(1)",
     "https://[fe80::1%25eth0]/", "https://127.1/", "https://0x7f000001/", "https://2130706433/"],
)  # fmt: skip
def test_an_address_that_could_never_do_is_refused_with_a_remedy(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_url(url, Settings(home=tmp_path))

    assert refused.value.field == "url"
    assert refused.value.remedy
    assert "secret" not in str(refused.value.problem())


def test_an_address_that_does_is_taken(tmp_path: Path) -> None:
    check_url("https://hooks.example:8443/a/b?c=d", Settings(home=tmp_path))


def test_of_an_address_only_the_host_is_shown() -> None:
    assert shown_url("https://hooks.example:8443/T0/SECRET?key=1") == "https://hooks.example:8443/…"
    assert shown_url("https://hooks.example") == "https://hooks.example/"
    assert "SECRET" not in shown_url("https://exa mple/SECRET")


# -- the signature ---------------------------------------------------------------------------------------------------


def test_a_signature_is_the_one_that_standard_webhooks_describes() -> None:
    key = SigningKey(b"k" * 32)

    headers = key.headers("alert", "m1", 1700000000, b'{"a":1}')

    secret = base64.b64decode(key.secret("alert").removeprefix("whsec_"))
    wanted = hmac.new(secret, b'm1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "m1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(wanted).decode(),
    }
    assert key.secret("another") != key.secret("alert")


def test_a_key_is_made_once_for_this_user_alone_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "alert.key"

    first, second = SigningKey.load(path), SigningKey.load(path)

    assert first.id == second.id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["alert.key"]


def test_a_key_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "alert.key"
    path.write_bytes(b"short")

    with pytest.raises(ValueError, match="5 bytes"):
        SigningKey.load(path)
