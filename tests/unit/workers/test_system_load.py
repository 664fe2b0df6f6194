"""Each rank's load is sampled, kept while the controller is away, and sent once it is back."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from muonscope.contract.attempts import LoadReport
from workers import system_load
from workers.spool import Destination


class _Controller:
    """Answers with a status that the test sets, and keeps the reports it took."""

    def __init__(self) -> None:
        self.status = 204
        self.reports: list[LoadReport] = []
        self.refused: list[LoadReport] = []
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = controller.status
                if status == 204:
                    assert self.path == "/attempts/run-x-a1/load"
                    assert self.headers["Authorization"] == "Bearer secret"
                    controller.reports.append(LoadReport.model_validate_json(body))
                else:
                    controller.refused.append(LoadReport.model_validate_json(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.destination = Destination(f"http://127.0.0.1:{self.server.server_port}", "run-x-a1", "secret", 1)

    @property
    def samples(self) -> list[Any]:
        return [sample for report in self.reports for sample in report.samples]


@pytest.fixture
def controller() -> Iterator[_Controller]:
    serving = _Controller()
    thread = threading.Thread(target=serving.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield serving
    serving.server.shutdown()
    thread.join()
    serving.server.server_close()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_says_how_busy_it_and_its_node_are(controller: _Controller) -> None:
    before = time.time()
    sampler = system_load.start(controller.destination, 3, period_s=0.2)
    _wait_for(lambda: len(controller.samples) >= 2)
    sampler.stop()

    first, second = controller.samples[:2]
    assert (first.rank, second.rank) == (3, 3)
    assert before < first.at < second.at < time.time()
    assert first.cpu_percent >= 0
    assert 0 < first.memory_bytes < first.node_memory_total_bytes
    assert 0 < first.node_memory_bytes < first.node_memory_total_bytes


def test_a_share_of_the_processor_over_too_short_a_time_is_not_measured_and_no_zero(
    controller: _Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortest_s = system_load.SHORTEST_S
    monkeypatch.setattr(system_load, "SHORTEST_S", 3600.0)
    short = system_load.start(controller.destination, 0, period_s=3600.0)
    short.stop()
    monkeypatch.setattr(system_load, "SHORTEST_S", shortest_s)
    long = system_load.start(controller.destination, 1, period_s=3600.0)
    busy_until = time.process_time() + 0.3
    while time.process_time() < busy_until:
        pass
    long.stop()

    first, second = controller.samples
    assert (first.rank, first.cpu_percent, first.node_cpu_percent) == (0, None, None)
    assert first.memory_bytes > 0
    assert second.rank == 1
    assert second.cpu_percent > 0
    assert second.node_cpu_percent > 0


def test_samples_wait_while_the_controller_is_away(controller: _Controller) -> None:
    controller.status = 503
    sampler = system_load.start(controller.destination, 0, period_s=0.02)
    _wait_for(lambda: any(len(report.samples) >= 3 for report in controller.refused))
    controller.status = 204
    _wait_for(lambda: len(controller.samples) >= 3)
    sampler.stop()

    moments = [sample.at for sample in controller.samples]
    assert moments == sorted(set(moments))
    assert len(controller.reports[0].samples) >= 3


def test_a_controller_that_refuses_is_left_alone(controller: _Controller) -> None:
    controller.status = 409
    sampler = system_load.start(controller.destination, 0, period_s=0.02)
    _wait_for(lambda: not sampler._thread.is_alive())
    controller.status = 204
    sampler.stop()

    assert controller.samples == []


def test_a_stop_sends_a_last_sample_at_once(controller: _Controller) -> None:
    sampler = system_load.start(controller.destination, 0, period_s=3600.0)
    sampler.stop()

    assert len(controller.samples) == 1


def test_a_gpu_that_answers_is_measured_and_a_partition_without_use_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    class Memory:
        used, total = 7, 11

    class Rates:
        gpu = 42

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: Rates)
    whole = system_load._find_gpu()()

    def refuse(handle: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
    partition = system_load._find_gpu()()

    assert whole == {"gpu_percent": 42.0, "gpu_memory_bytes": 7, "gpu_memory_total_bytes": 11}
    assert partition == {"gpu_memory_bytes": 7, "gpu_memory_total_bytes": 11}


def test_what_is_sent_is_json_that_the_contract_takes() -> None:
    sampler = system_load.Sampler(Destination("http://127.0.0.1:1", "run-x-a1", "secret", 1), 1, 1.0)
    text = json.dumps({"samples": [sampler._sample()]})
    assert LoadReport.model_validate_json(text).samples[0].rank == 1
