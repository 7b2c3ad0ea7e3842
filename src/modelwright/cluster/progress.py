"""Publish training progress to OpenShift AI (GET /metrics) and to Kubeflow Trainer (POST).

Off unless the pod's environment variables enable it, and then only in rank 0. Training never waits for either."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from modelwright.runs.journal import Event, EventListener

POST_INTERVAL = 5.0
"""Between two updates to the Trainer; more would load its controller."""
METRICS_PORT_ENV = "MODELWRIGHT_METRICS_PORT"
OLD_METRICS_PORT_ENV = "MODELWRIGHT_PROGRESS_PORT"
"""Its name in jobs that version 0.1 rendered."""
TRAINER_URL_ENV, TRAINER_CA_CERT_ENV, TRAINER_TOKEN_ENV = (
    f"KUBEFLOW_TRAINER_SERVER_{suffix}" for suffix in ("URL", "CA_CERT", "TOKEN")
)


class JobProgress:
    """Progress of the run, from the journal's events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: Event = {}
        self._eval_metrics: dict[str, float] = {}
        self._epochs = 1.0
        self._done = False

    def update(self, event: Event) -> None:
        """Take in what happened."""
        with self._lock:
            kind = event.get("event")
            if kind == "step":
                self._step = event
            elif kind == "plan":
                rows = event.get("train_rows") or 1
                self._epochs = max(1.0, float(event.get("total_samples") or rows) / float(rows))
            elif kind == "evaluation":
                metrics = [(key, value) for key, value in event.items() if key.startswith("eval_")]
                self._eval_metrics |= {key: float(value) for key, value in metrics if isinstance(value, int | float)}
            elif kind == "done":
                self._done = True

    def openshift_ai_metrics(self) -> dict[str, Any]:
        """What OpenShift AI asks for."""
        with self._lock:
            step, steps = int(self._step.get("step", 0)), int(self._step.get("steps", 0))
            train_metrics = {key: self._step.get(key) for key in ("loss", "learning_rate", "grad_norm")}
            train_metrics["throughput_tokens_sec"] = self._step.get("tokens_per_second")
            remaining = 0 if self._done else self._step.get("eta_seconds")
            percentage = 100 if self._done else min(99, round(100 * step / steps)) if steps else 0
            return {
                "progressPercentage": percentage,
                "estimatedRemainingSeconds": None if remaining is None else int(remaining),
                "currentStep": step,
                "totalSteps": steps,
                "currentEpoch": round(float(self._step.get("epoch") or 0.0), 2),
                "totalEpochs": round(self._epochs),
                "trainMetrics": {key: value for key, value in train_metrics.items() if value is not None},
                "evalMetrics": dict(self._eval_metrics),
            }

    def trainer_status(self) -> dict[str, Any]:
        """The status for Kubeflow Trainer."""
        metrics = self.openshift_ai_metrics()
        numbers = {**metrics["trainMetrics"], **metrics["evalMetrics"]}
        status: dict[str, Any] = {
            "progressPercentage": metrics["progressPercentage"],
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in numbers.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        if metrics["estimatedRemainingSeconds"] is not None:
            status["estimatedRemainingSeconds"] = metrics["estimatedRemainingSeconds"]
        return {"trainerStatus": status}


@contextmanager
def publish_progress(listener: EventListener, environ: Mapping[str, str] | None = None) -> Iterator[EventListener]:
    """A listener that also publishes progress if the pod's variables enable it; otherwise the same listener."""
    values = os.environ if environ is None else environ
    is_rank0 = values.get("RANK", "0") == "0"
    port = values.get(METRICS_PORT_ENV) or values.get(OLD_METRICS_PORT_ENV, "")
    server = values.get(TRAINER_URL_ENV)
    if not is_rank0 or not (port.isdigit() or server):
        yield listener
        return
    progress = JobProgress()

    def forward(event: Event) -> None:
        progress.update(event)
        listener(event)

    with ExitStack() as stack:
        if port.isdigit():
            stack.enter_context(_serve_metrics(progress, int(port)))
        if server and values.get(TRAINER_TOKEN_ENV):
            stack.enter_context(_post_trainer_status(progress, server, values))
        yield forward


@contextmanager
def _serve_metrics(progress: JobProgress, port: int) -> Iterator[None]:
    """Answer GET /metrics; a port that is in use does not stop training."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(progress.openshift_ai_metrics()).encode()
            known = self.path.rstrip("/") in ("/metrics", "")
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if known else 0))
            self.end_headers()
            self.wfile.write(body if known else b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Polls are not worth a line."""

    try:
        server = ThreadingHTTPServer(("0.0.0.0", port), Answer)
    except OSError:
        yield
        return
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _post_trainer_status(progress: JobProgress, url: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Post the status now and then, and once at the end."""
    stopped = threading.Event()

    def post() -> None:
        with contextlib.suppress(Exception):  # whatever the controller answers, training continues
            # read every time: it is rotated every hour
            token = Path(environ[TRAINER_TOKEN_ENV]).read_text(encoding="utf-8").strip()
            certificate = environ.get(TRAINER_CA_CERT_ENV)
            ssl_context = ssl.create_default_context(cafile=certificate) if url.startswith("https:") else None
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(progress.trainer_status()).encode(), headers)
            urllib.request.urlopen(request, timeout=5, context=ssl_context).close()

    def post_periodically() -> None:
        while not stopped.wait(POST_INTERVAL):
            post()

    thread = threading.Thread(target=post_periodically, daemon=True, name="trainer-status")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(timeout=POST_INTERVAL)
        post()
