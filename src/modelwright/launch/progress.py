"""Show progress where users of a cluster look: OpenShift AI asks a port for it, Kubeflow Trainer is told it.

Off unless the pod's variables ask for it, and then only in the first rank. Training never waits for either.
"""

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

from modelwright.runs.journal import Event, Watcher

TELL_SECONDS = 5.0
"""Between two updates to the Trainer; more would load its controller."""
PORT = "MODELWRIGHT_PROGRESS_PORT"
URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{word}" for word in ("URL", "CA_CERT", "TOKEN"))


class Progress:
    """Where the run stands, gathered from the journal's events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step: Event = {}
        self._measured: dict[str, float] = {}
        self._epochs = 1.0
        self._done = False

    def hear(self, event: Event) -> None:
        """Take in what happened."""
        with self._lock:
            kind = event.get("event")
            if kind == "step":
                self._step = event
            elif kind == "plan":
                rows = event.get("rows") or 1
                self._epochs = max(1.0, float(event.get("total_rows") or rows) / float(rows))
            elif kind == "evaluation":
                facts = {key: value for key, value in event.items() if key.startswith("eval_")}
                self._measured |= {key: float(value) for key, value in facts.items() if isinstance(value, int | float)}
            elif kind == "done":
                self._done = True

    def as_metrics(self) -> dict[str, Any]:
        """What OpenShift AI asks for."""
        with self._lock:
            step, steps = int(self._step.get("step", 0)), int(self._step.get("steps", 0))
            facts = {"loss": self._step.get("loss"), "learning_rate": self._step.get("learning_rate"),
                     "grad_norm": self._step.get("grad_norm"),
                     "throughput_tokens_sec": self._step.get("tokens_per_second")}  # fmt: skip
            left = 0 if self._done else self._step.get("eta_seconds")
            share = 100 if self._done else min(99, round(100 * step / steps)) if steps else 0
            return {
                "progressPercentage": share,
                "estimatedRemainingSeconds": None if left is None else int(left),
                "currentStep": step,
                "totalSteps": steps,
                "currentEpoch": round(float(self._step.get("epoch") or 0.0), 2),
                "totalEpochs": round(self._epochs),
                "trainMetrics": {key: value for key, value in facts.items() if value is not None},
                "evalMetrics": dict(self._measured),
            }

    def as_status(self) -> dict[str, Any]:
        """What Kubeflow Trainer is told."""
        metrics = self.as_metrics()
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
def shown(watch: Watcher, environ: Mapping[str, str] | None = None) -> Iterator[Watcher]:
    """A watcher that also shows progress, where the pod's variables ask for it; otherwise the same watcher."""
    values = os.environ if environ is None else environ
    first = values.get("RANK", "0") == "0"
    port, server = values.get(PORT, ""), values.get(URL)
    if not first or not (port.isdigit() or server):
        yield watch
        return
    progress = Progress()

    def both(event: Event) -> None:
        progress.hear(event)
        watch(event)

    with ExitStack() as open_things:
        if port.isdigit():
            open_things.enter_context(_served(progress, int(port)))
        if server and values.get(TOKEN):
            open_things.enter_context(_told(progress, server, values))
        yield both


@contextmanager
def _served(progress: Progress, port: int) -> Iterator[None]:
    """Answer GET /metrics; a port that is taken is no reason not to train."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(progress.as_metrics()).encode()
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
def _told(progress: Progress, url: str, values: Mapping[str, str]) -> Iterator[None]:
    """Post the status now and then, and once at the end."""
    over = threading.Event()

    def tell() -> None:
        with contextlib.suppress(Exception):  # whatever the controller answers, training goes on
            token = Path(values[TOKEN]).read_text(encoding="utf-8").strip()  # read anew: it is exchanged every hour
            trust = ssl.create_default_context(cafile=values.get(CERTIFICATE)) if url.startswith("https:") else None
            head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(progress.as_status()).encode(), head)
            urllib.request.urlopen(request, timeout=5, context=trust).close()

    def keep_telling() -> None:
        while not over.wait(TELL_SECONDS):
            tell()

    thread = threading.Thread(target=keep_telling, daemon=True, name="trainer-status")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=TELL_SECONDS)
        tell()
