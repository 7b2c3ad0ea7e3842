"""Decoded tokens per second of our decoder and of `modelwright serve`, beside transformers' `generate`.

    python -m benchmarks.decoding                       one GPU, at most 280 s
    python -m benchmarks.decoding decoder answers       these parts only
    python -m benchmarks.decoding --device cpu          tries the command with tiny models

Models of real shapes with random weights in bf16, prompts of random tokens, and answers that no EOS ends. Every decoder
and server decodes once before it is timed, so that its CUDA graphs are captured. Prints a table last; --out keeps the
figures as JSON, with date, commit and machine. What fails is a line that says why, and the rest is measured."""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from benchmarks import common
from benchmarks.common import Figures, free_device, now
from benchmarks.mixed_lengths import save_number_tokenizer
from benchmarks.tables import markdown_table
from benchmarks.workloads import SEED, SMOLLM3_3B, random_model
from modelwright.errors import UsageError
from modelwright.launch.supervisor import package_pythonpath
from modelwright.runs.folder import RUN_FORMAT, RunFolder, write_json
from modelwright.runs.journal import Journal

Rows = Iterator[tuple[str, Callable[[], Figures]]]
"""The lines of a part: their names, and what measures them."""
QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
ROUNDS = 2
"""How often the clients ask."""
GREEDY: dict[str, float] = {"temperature": 0.0}
STATIC = {"cache_implementation": "static"}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and of what they decode."""

    large: dict[str, Any]
    """Shape of the Qwen3 model."""
    small: dict[str, Any]
    """Shape of the SmolLM3 model that gives ten answers."""
    rows: int
    """Prompts decoded at once."""
    prompt: int
    """Tokens of each."""
    new: int
    """Tokens of each answer."""
    peer_new: int
    """Tokens of an answer of transformers' generate."""
    served: int
    """Tokens of a streamed answer."""
    ten: int
    """Tokens of each of the ten answers."""


GPU = Scale(QWEN3_4B, SMOLLM3_3B, rows=32, prompt=128, new=512, peer_new=96, served=256, ten=128)
CPU = Scale(TINY, TINY, rows=4, prompt=16, new=12, peer_new=8, served=12, ten=8)


@dataclass
class Bench:
    """The models that several parts use, the figures so far, and what is left behind to remove."""

    device: str
    scale: Scale
    figures: dict[str, Figures] = field(default_factory=dict)
    """By the names of the lines."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    _model: Any = None
    _folder: Path | None = None

    def model(self) -> Any:
        """The large model, with a tokenizer in the folder it will be saved to."""
        if self._model is None:
            tokenizer = save_number_tokenizer(self.folder(), self.scale.large["vocab_size"] - 1)
            self._model = self.build("qwen3", self.scale.large, tokenizer)
        return self._model

    def build(self, model_type: str, shape: dict[str, Any], tokenizer: Any = None) -> Any:
        """A model with random weights, in bf16 on a GPU."""
        import torch

        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        special = tokenizer or SimpleNamespace(eos_token_id=None, pad_token_id=0)
        return random_model(model_type, shape, self.device, special, dtype).eval()

    def folder(self) -> Path:
        """A temporary folder, in memory where there is room for the model."""
        if self._folder is None:
            memory = Path("/dev/shm")
            has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 20e9
            parent = memory if has_room else None
            self._folder = Path(self.cleanup.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        return self._folder

    def saved_run(self) -> Path:
        """A run whose base model is the large one, which is not kept on the device; its EOS is never the likeliest."""
        import torch

        run = RunFolder(self.folder() / "run")
        if not run.recipe.exists():
            model = self.model()
            with torch.no_grad():  # its logit is 0
                model.get_output_embeddings().weight[model.config.eos_token_id] = 0
            model.save_pretrained(self.folder())
            run.path.mkdir()
            data = {"train_file": str(self.folder() / "rows.jsonl")}
            recipe = {"name": "decoding", "model": {"model_name_or_path": str(self.folder())}, "data": data, "sft": {}}
            run.recipe.write_text(json.dumps(recipe))
            Journal(run.journal).add("run", run_format=RUN_FORMAT, recipe="decoding", stages=["sft"])
            self._model = None
            free_device()
        return run.path

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of random tokens, the same in every run."""
        rng, words = random.Random(SEED), self.scale.large["vocab_size"] - 1
        return [[rng.randrange(1, words) for _ in range(length)] for _ in range(count)]


def decoder_rows(bench: Bench) -> Rows:
    """Our decoder as built, compiled, and with sampling."""
    from modelwright.serve.decoder import Decoder

    model, scale = bench.model(), bench.scale
    what = f"{scale.rows} prompts × {scale.new} tokens"
    began = now()
    decoder = Decoder(model)
    chosen = {"cache_seconds": round(now() - began, 1), "cache": type(decoder.cache).__name__}
    yield f"decoder, not compiled: {what}", lambda: {**chosen, **decoded(bench, decoder, GREEDY)}
    began = now()
    decoder.compile_for(math.inf)
    compiled = {"compile_seconds": round(now() - began, 1), "compiled": getattr(decoder.cache, "compiled", False)}
    yield f"decoder, compiled: {what}", lambda: {**compiled, **decoded(bench, decoder, GREEDY)}
    yield f"decoder, compiled, sampled: {what}", lambda: decoded(bench, decoder, SAMPLED)


def generate_rows(bench: Bench) -> Rows:
    """Transformers' generate with its two kinds of cache, not compiled."""
    what = f"{bench.scale.rows} prompts × {bench.scale.peer_new} tokens"
    yield f"transformers.generate: {what}", lambda: generated(bench, {})
    static = {**STATIC, "disable_compile": True}
    yield f"transformers.generate, static cache, not compiled: {what}", lambda: generated(bench, static)


def compiled_generate_rows(bench: Bench) -> Rows:
    """Generate as it compiles itself for a static cache, which took 64 s on an H200."""
    what = f"{bench.scale.rows} prompts × {bench.scale.peer_new} tokens"
    yield f"transformers.generate, static cache, compiled: {what}", lambda: generated(bench, STATIC)


def decoded(bench: Bench, decoder: Any, params: dict[str, float]) -> Figures:
    """Tokens per second, after the graphs of every width are captured, the widest first."""
    scale, began = bench.scale, now()
    for length in dict.fromkeys((scale.prompt + scale.new - 3, scale.prompt + scale.new // 2, scale.prompt)):
        decode(decoder, bench.prompts(scale.rows, length), 3, params)
    warm = now() - began
    seconds = decode(decoder, bench.prompts(scale.rows, scale.prompt), scale.new, params)
    return {**rate(scale.rows * scale.new, seconds), "warm_up_seconds": round(warm, 1)}


def decode(decoder: Any, prompts: Sequence[list[int]], new: int, params: dict[str, float]) -> float:
    """The seconds of these answers, decoded as TextGenerator does it."""
    from modelwright.serve.sampling import DecodeRequest, SamplingParams

    requests = [DecodeRequest(prompt, SamplingParams(new, **params), frozenset()) for prompt in prompts]  # type: ignore[arg-type]
    began = now()
    decoder.submit(*requests)
    while not all(request.finished for request in requests):
        decoder.step()
    seconds = now() - began
    if error := next((request.error for request in requests if request.error), None):
        raise error
    return seconds


def generated(bench: Bench, options: dict[str, Any]) -> Figures:
    """Tokens per second of transformers' generate, after two tokens that are not timed."""
    import torch

    model, scale = bench.model(), bench.scale
    tokens = torch.tensor(bench.prompts(scale.rows, scale.prompt), device=model.device)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    began = now()
    new = scale.peer_new if "cache_implementation" in options else 2  # a static cache has the size of the answer
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **settings)
    warm, began = now() - began, now()
    answers = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=scale.peer_new, **settings)
    count = answers[:, scale.prompt :].numel()
    return {**rate(count, now() - began), "warm_up_seconds": round(warm, 1)}


def answers_rows(bench: Bench) -> Rows:
    """Ten answers of a 3 B model as before and after a run: once, with the choice of the cache."""
    from modelwright.serve.decoder import Decoder

    model, scale = bench.build("smollm3", bench.scale.small), bench.scale
    prompts = [[token % (scale.small["vocab_size"] - 1) for token in prompt] for prompt in bench.prompts(10, 48)]

    def measure() -> Figures:
        began = now()
        decoder = Decoder(model)
        chosen = now() - began
        seconds = chosen + decode(decoder, prompts, scale.ten, GREEDY)
        again = decode(decoder, prompts, scale.ten, GREEDY)
        return {"seconds": round(seconds, 2), "cache_seconds": round(chosen, 2), "again_seconds": round(again, 2)}

    yield f"ten answers of a 3 B model, {scale.ten} tokens each", measure


def serve_rows(bench: Bench) -> Rows:
    """A server as it starts by default."""
    return server_rows(bench, "--compile")


def plain_serve_rows(bench: Bench) -> Rows:
    """A server that does not compile."""
    return server_rows(bench, "--no-compile")


def server_rows(bench: Bench, option: str) -> Rows:
    """One request, many at once, and one client more, which reads as fast as the others or one byte a second."""
    scale, run = bench.scale, bench.saved_run()
    with Server(bench, run, option) as server:
        began, many, name = time.perf_counter(), scale.rows, f"serve {option}"
        for count in (many + 1, *(2**power for power in range(many.bit_length() - 1))):
            server.ask(count, rounds=1)  # captures the graphs of every number of rows, the largest first
        warm = {"start_seconds": server.start_seconds, "warm_up_seconds": round(time.perf_counter() - began, 1)}
        yield f"{name}: one request of {scale.served} tokens", lambda: warm | server.ask(1)
        yield f"{name}: {many} requests", lambda: server.ask(many)
        yield f"{name}: {many} requests, and one more", lambda: server.ask(many + 1)
        slowly = f"{name}: {many} requests, and one more that is read at one byte a second"
        yield slowly, lambda: server.ask(many + 1, slow=True)


class Server:
    """`modelwright serve` as a process."""

    def __init__(self, bench: Bench, run: Path, option: str) -> None:
        self._bench, self._alone, began = bench, 0.0, time.perf_counter()
        command = [sys.executable, "-m", "modelwright", "serve", str(run), "--base", "--port", "0", option]
        variables = {"PYTHONPATH": package_pythonpath(), "HF_HUB_OFFLINE": "1"}
        if bench.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables}, text=True)
        bench.cleanup.callback(self._process.kill)  # does nothing once it has ended
        endpoint: dict[str, str] = {}
        while "model" not in endpoint:
            assert self._process.stdout is not None
            if not (line := self._process.stdout.readline()):
                raise RuntimeError(f"serve ended with exit code {self._process.wait()} before it was ready")
            key, _, value = line.partition(" ")
            endpoint[key] = value.strip()
        self._address, self._key = urlsplit(endpoint["base_url"]).netloc, endpoint["api_key"]
        self.start_seconds = round(time.perf_counter() - began, 1)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, count: int, slow: bool = False, rounds: int = ROUNDS) -> Figures:
        """Stream answers to many clients at once; one beyond `rows` is not counted. `slow`: the last reads slowly."""
        counted, seconds, clients = min(count, self._bench.scale.rows), 0.0, []
        for _ in range(rounds):
            round_clients, round_seconds = self._ask_once(count, counted, slow)
            clients += round_clients[:counted]
            seconds += round_seconds
        tokens = [client.tokens() for client in clients]
        figures = rate(sum(tokens), seconds)
        figures |= {"lost": sum(number != self._bench.scale.served for number in tokens), "of": len(tokens)}
        if first := [client.first_seconds for client in clients if client.first_seconds]:
            figures["first_piece_seconds"] = round(statistics.median(first), 3)
        if errors := [client.error for client in clients if client.error]:
            figures["error"] = errors[0]
        if count == 1:
            self._alone = figures["tokens_per_second"]
        elif self._alone:
            figures["times_one_request"] = round(figures["tokens_per_second"] / self._alone, 1)
        return figures

    def _ask_once(self, count: int, counted: int, slow: bool) -> tuple[list[Client], float]:
        """The clients after their answers, and the seconds until the counted ones had theirs."""
        scale, over = self._bench.scale, threading.Event()
        prompts = self._bench.prompts(count, scale.prompt)
        clients = [Client(self._address, self._key, prompt, scale.served) for prompt in prompts]
        threads = [threading.Thread(target=client.read, daemon=True) for client in clients]
        if slow:
            threads[-1] = threading.Thread(target=clients[-1].read_slowly, args=(over,), daemon=True)
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads[:counted]:
            thread.join()
        seconds = time.perf_counter() - began
        over.set()
        for thread in threads[counted:]:
            thread.join()
        return clients, seconds


class Client:
    """One streamed request."""

    def __init__(self, address: str, key: str, prompt: list[int], new: int) -> None:
        self._address, self._key, self.first_seconds, self.body, self.error = address, key, 0.0, b"", ""
        message = {"role": "user", "content": " ".join(map(str, prompt))}
        self._payload = json.dumps({"messages": [message], "max_tokens": new, "temperature": 0, "stream": True,
                                    "stream_options": {"include_usage": True}})  # fmt: skip

    def read(self) -> None:
        """Read the answer as it comes."""
        connection = http.client.HTTPConnection(self._address, timeout=120)
        pieces: list[bytes] = []
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/chat/completions", self._payload, self._headers())
            response = connection.getresponse()
            while piece := response.read1(65536):
                pieces.append(piece)
                if len(pieces) == 2:  # the first one holds the role
                    self.first_seconds = time.perf_counter() - began
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        self.body = b"".join(pieces)

    def read_slowly(self, over: threading.Event) -> None:
        """Read one byte a second, with the smallest buffer there is, until it is over."""
        host, port = self._address.split(":")
        head = "".join(f"{name}: {value}\r\n" for name, value in self._headers().items())
        request = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address}\r\n{head}\r\n{self._payload}"
        with socket.socket() as connection, suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.settimeout(60)
            connection.connect((host, int(port)))
            connection.sendall(request.encode())
            while not over.wait(1):
                self.body += connection.recv(1)

    def _headers(self) -> dict[str, str]:
        length = str(len(self._payload))
        return {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json", "Content-Length": length}

    def tokens(self) -> int:
        """The tokens of the answer as the server counts them; 0 where it is not complete."""
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if not events or events[-1] != b"[DONE]":
            self.error = self.error or self.body[-200:].decode(errors="replace")
            return 0
        return int(json.loads(events[-2])["usage"]["completion_tokens"])


def rate(tokens: int, seconds: float) -> Figures:
    """Tokens per second."""
    return {"tokens_per_second": round(tokens / seconds, 1), "tokens": tokens, "seconds": round(seconds, 2)}


PARTS: dict[str, Callable[[Bench], Rows]] = {
    "decoder": decoder_rows, "generate": generate_rows, "serve": serve_rows, "answers": answers_rows,
    "serve-plain": plain_serve_rows, "generate-compiled": compiled_generate_rows,
}  # fmt: skip
DEFAULT_PARTS = [name for name in PARTS if name != "generate-compiled"]


def measure(bench: Bench, parts: Sequence[str]) -> None:
    """Measure the parts one after the other; a line or a part that fails says why, and the next one follows."""
    progress = common.Progress("decoding")

    def keep(what: str, figures: Figures) -> None:
        bench.figures[what] = figures
        progress.log(f"{what}: {figures}")

    for name in parts:
        progress.log(name)
        try:
            for what, function in PARTS[name](bench):
                try:
                    keep(what, function())
                except Exception as error:
                    keep(what, _failure(error))
        except Exception as error:
            keep(name, _failure(error))
        free_device()


def _failure(error: Exception) -> Figures:
    return {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}


def table(figures: dict[str, Figures]) -> str:
    """A line for each measurement."""
    lines = []
    for what, each in figures.items():
        unit = "tokens_per_second" if "tokens_per_second" in each else "seconds"
        figure = f"{each.get(unit, 0):,.0f} tokens/s" if "_" in unit else f"{each.get(unit)} s"
        left_out = (unit, "tokens")
        details = [f"{key.replace('_', ' ')} {value}" for key, value in each.items() if key not in left_out]
        failed = [what, f"failed: {each['failed']}", ""] if "failed" in each else None
        lines.append(failed or [what, figure, ", ".join(details)])
    return markdown_table(("what", "figure", "details"), lines)


def main(
    parts: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(PARTS)}; default: without the last.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: tiny models, to try the command.")] = "",
    seconds: Annotated[float, typer.Option(help="Print what there is and end after so many seconds.")] = 280,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the figures.")] = None,
) -> None:
    """Decoded tokens per second of our decoder and of serve, and generate's beside them."""
    import torch

    if unknown := [name for name in parts or () if name not in PARTS]:
        raise UsageError(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    bench, lock, is_printed = Bench(device, GPU if device == "cuda" else CPU), threading.Lock(), threading.Event()

    def finish() -> None:
        with lock:
            if is_printed.is_set():
                return
            is_printed.set()
            figures = dict(bench.figures)
            print(table(figures), flush=True)
            if out is not None:
                name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
                write_json(out, common.result("decoding", {"device": name, "rows": figures}))

    def end() -> None:
        bench.figures["the rest"] = {"failed": f"not measured within {seconds:g} s"}
        finish()
        with suppress(Exception):
            bench.cleanup.close()
        os._exit(1)

    watchdog = threading.Timer(seconds, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        with bench.cleanup:
            measure(bench, parts or DEFAULT_PARTS)
    finally:
        watchdog.cancel()
        finish()


if __name__ == "__main__":
    common.run(main)
