"""Progress where users of a cluster look, in the shapes that are documented, and nowhere unasked."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from modelwright.cluster import progress
from modelwright.cluster.progress import publish_progress
from tests.faults.fork_server import free_port

EVENTS: list[dict[str, Any]] = [
    {"event": "plan", "stage": "sft", "train_rows": 100, "total_samples": 400},
    {"event": "evaluation", "stage": "sft", "step": 0, "eval_loss": 4.5},
    {"event": "step", "stage": "sft", "step": 25, "steps": 100, "epoch": 1.0, "loss": 2.5, "grad_norm": 0.5,
     "learning_rate": 2e-4, "tokens_per_second": 1234.5, "eta_seconds": 90.4},
]  # fmt: skip


def ask(port: int, path: str = "/metrics") -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        return json.loads(answer.read())


@pytest.mark.parametrize("variable", ["MODELWRIGHT_METRICS_PORT", "MODELWRIGHT_PROGRESS_PORT"])
def test_openshift_ai_finds_the_numbers_it_asks_for(variable: str) -> None:
    """Jobs that version 0.1 rendered set the second variable."""
    port, heard = free_port(), []
    with publish_progress(heard.append, {variable: str(port), "RANK": "0"}) as watch:
        assert ask(port)["progressPercentage"] == 0
        for event in EVENTS:
            watch(event)
        assert ask(port) == {
            "progressPercentage": 25, "estimatedRemainingSeconds": 90, "currentStep": 25, "totalSteps": 100,
            "currentEpoch": 1.0, "totalEpochs": 4, "evalMetrics": {"eval_loss": 4.5},
            "trainMetrics": {"loss": 2.5, "learning_rate": 2e-4, "grad_norm": 0.5, "throughput_tokens_sec": 1234.5},
        }  # fmt: skip
        watch({"event": "done"})
        assert (ask(port)["progressPercentage"], ask(port)["estimatedRemainingSeconds"]) == (100, 0)
    assert heard == [*EVENTS, {"event": "done"}]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port is closed with the run"


def test_nothing_listens_unasked_or_in_another_rank() -> None:
    heard: list[Any] = []
    before = threading.active_count()
    for environ in ({}, {"MODELWRIGHT_METRICS_PORT": str(free_port()), "RANK": "1"}):
        with publish_progress(heard.append, environ) as watch:
            assert watch == heard.append
            assert threading.active_count() == before


def test_a_taken_port_does_not_stop_the_training() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        heard: list[Any] = []
        with publish_progress(heard.append, {"MODELWRIGHT_METRICS_PORT": str(other.getsockname()[1])}) as watch:
            watch(EVENTS[0])
    assert heard == EVENTS[:1]


def test_the_trainer_is_authenticated_by_the_token_in_its_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "POST_INTERVAL", 0.05)
    received: list[tuple[str, dict[str, Any]]] = []

    class Controller(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.headers["Authorization"], body))
            self.send_response(
                500 if len(received) == 1 else 200
            )  # its first answer is an error, which must not matter
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Controller)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("first\n")
    environ = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(tmp_path / "none"),
    }
    with publish_progress(lambda event: None, environ) as watch:
        for event in EVENTS:
            watch(event)
        while not received:
            threading.Event().wait(0.01)
        (tmp_path / "token").write_text("second\n")
        watch({"event": "done"})
    server.shutdown()
    server.server_close()
    assert received[0][0] == "Bearer first"
    authorization, body = received[-1]
    assert authorization == "Bearer second", "the token is exchanged while the run lasts"
    status = body["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    assert {"name": "loss", "value": "2.5"} in status["metrics"]
    assert status["lastUpdatedTime"].endswith("Z")


def test_a_controller_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    environ = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{free_port()}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "none"),
    }
    heard: list[Any] = []
    with publish_progress(heard.append, environ) as watch:
        watch(EVENTS[0])
    assert heard == EVENTS[:1]
