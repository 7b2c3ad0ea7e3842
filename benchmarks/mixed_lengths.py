"""Training with default settings on rows of every length, beside TRL: rate, memory, and what the plan predicted.

    python -m benchmarks.mixed_lengths qwen3-0.6b dpo-llama-1b          these cases, each in its own process
    python -m benchmarks.mixed_lengths qwen3-0.6b --with torch_compile=true --no-peers
    python -m benchmarks.mixed_lengths unfitted --steps 30              12 trainings that the planner was not fitted to
    python -m benchmarks.mixed_lengths qwen3-0.6b --flags               the default beside the flags a user can set
    python -m benchmarks.mixed_lengths qwen3-0.6b --device cpu          tries the command with a tiny model

Random weights of real shapes; rows of the lengths in row-lengths.json (MODELWRIGHT_SHARED), filled with numbers, with
nothing in common. The recipe declares three epochs and training stops at --steps; the rate is that of the second half.
The predicted step time is compared with the median: CUDA graphs are captured in several of the first 60 steps.
Peers train fewer steps, since they compile nothing. Prints a table last; --out keeps the figures of a case as JSON once
it has ended."""

from __future__ import annotations

import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.common import ROOT, free_device, require_finite
from benchmarks.peer_trainers import StepTimes, in_engine_order, train_engine, train_peer
from benchmarks.tables import markdown_table
from benchmarks.workloads import EOS, SEED
from modelwright.errors import UsageError

Figures = dict[str, Any]
Texts = tuple[str, str, str]
"""A prompt, its answer and a rejected one."""
MAX_LENGTH, EPOCHS, LEARNING_RATE, WORDS = 512, 3, 1e-5, 500
LLAMA = {"max_position_embeddings": 4096, "rope_theta": 5e5}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }),
    "llama-3.2-1b": ("llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, **LLAMA,
    }),
    "gemma-3-270m": ("gemma3_text", {
        "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 4096,
        "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    }),
    "pythia-410m": ("gpt_neox", {
        "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "max_position_embeddings": 2048,
    }),
    "llama-3-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False, **LLAMA,
    }),
    **{name: (model_type, {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "max_position_embeddings": 4096, **others,
    }) for name, model_type, layers, width, inner, heads, key_heads, vocabulary, others in (
        ("qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936, {"tie_word_embeddings": True}),
        ("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 151936, {"tie_word_embeddings": True}),
        ("qwen3-1.7b", "qwen3", 28, 2048, 6144, 16, 8, 151936, {"tie_word_embeddings": True, "head_dim": 128}),
        ("llama-3.2-3b", "llama", 28, 3072, 8192, 24, 8, 128256, {"tie_word_embeddings": True}),
        ("smollm2-360m", "llama", 32, 960, 2560, 15, 5, 49152, {"tie_word_embeddings": True}),
        ("olmo-2-1b", "olmo2", 16, 2048, 8192, 16, 16, 100352, {}),
        ("mistral-7b", "mistral", 32, 4096, 14336, 32, 8, 32768, {"sliding_window": None}),
        ("gemma-2-2b", "gemma2", 26, 2304, 9216, 8, 4, 256000, {"head_dim": 256}),
        ("granite-3.1-2b", "granite", 40, 2048, 8192, 32, 8, 49155, {"tie_word_embeddings": True}),
        ("phi-1.5", "phi", 24, 2048, 8192, 32, 32, 51200, {"tie_word_embeddings": False}),
        ("pythia-1b", "gpt_neox", 16, 2048, 8192, 8, 8, 50304, {}),
    )},
    "tiny": ("llama", {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }),
}  # fmt: skip
LORA = {"trainable": "lora", "lora_r": 16}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] + ' ' }}{% if m['role'] == 'assistant' %}{% generation %}{{ eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Case:
    """A stage with its model and batch."""

    shape: str
    """Name in SHAPES."""
    stage: str = "sft"
    """sft or dpo."""
    rows: int = 32
    """Rows or pairs of a step."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the stage that say what is trained."""

    @property
    def is_lora(self) -> bool:
        """Whether LoRA matrices are trained."""
        return self.settings.get("trainable") == "lora"


CASES = {
    **{name: Case(name) for name in ("qwen3-0.6b", "llama-3.2-1b", "gemma-3-270m", "pythia-410m")},
    "dpo-llama-1b": Case("llama-3.2-1b", "dpo", 16),
    "lora-llama-8b": Case("llama-3-8b", "sft", 16, LORA),
}
UNFITTED = {
    "sft-llama-3b": Case("llama-3.2-3b", rows=16),
    "sft-olmo-1b": Case("olmo-2-1b"),
    "sft-gemma-2b": Case("gemma-2-2b", rows=16),
    "sft-phi-1.5": Case("phi-1.5"),
    "sft-qwen-1.7b-eager": Case("qwen3-1.7b", settings={"torch_compile": False}),
    "packed-qwen-0.5b": Case("qwen2.5-0.5b", rows=16, settings={"packing": True}),
    "packed-pythia-1b": Case("pythia-1b", rows=16, settings={"packing": True}),
    "packed-llama-1b-2048": Case("llama-3.2-1b", rows=8, settings={"packing": True, "max_length": 2048}),
    "dpo-smollm-360m": Case("smollm2-360m", "dpo", 16),
    "dpo-qwen-1.7b": Case("qwen3-1.7b", "dpo", 8),
    "lora-mistral-7b": Case("mistral-7b", "sft", 16, LORA),
    "lora-granite-2b": Case("granite-3.1-2b", "sft", 32, LORA),
}
"""Models, lengths and layouts that no coefficient of the planner was fitted to; trained without peers."""
ALL_CASES = {**CASES, **UNFITTED}
FLAGS = (
    ("torch_compile=true",), ("torch_compile=false",), ("torch_compile=true", "cuda_graphs=always"),
    ("torch_compile=false", "cuda_graphs=always"), ("torch_compile=true", "cuda_graphs=never"),
    ("torch_compile=false", "padding_free=false"),
)  # fmt: skip
"""What a user can set by hand without changing what is trained."""
PEERS = {"TRL": {}, "TRL + liger": {"use_liger_kernel": True}}


@dataclass(frozen=True)
class Work:
    """What ours and the peers train."""

    case: Case
    steps: int
    """Of ours."""
    peer_steps: int
    device: Any
    folder: Path
    """The model's config and tokenizer, without weights."""
    texts: list[Texts]

    def timed(self, times: StepTimes) -> Figures:
        """The rate of the second half of the steps, their median, loss and memory."""
        require_finite(times.losses)
        seconds = times.seconds[len(times.seconds) // 2 :]
        return {
            "rows_per_second": round(len(seconds) * self.case.rows / sum(seconds), 2),
            "step_seconds": round(sum(seconds) / len(seconds), 5),
            "median_step_seconds": round(statistics.median(seconds), 5),
            "memory_gb": round(times.memory / 1e9, 2),
            "start_seconds": round(times.start, 1),
            "steps_seconds": [round(each, 4) for each in times.seconds],
            "losses": [round(loss, 4) for loss in times.losses],
        }


def shared_data() -> Path:
    """The folder of the development data."""
    return Path(os.environ.get("MODELWRIGHT_SHARED", ROOT.parent / "shared")) / "data"


def row_texts(count: int | None, divisor: int = 1) -> list[Texts]:
    """Prompts and answers of real lengths, the rejected answer that of the row before; answers end with EOS."""
    path, rng = shared_data() / "row-lengths.json", random.Random(SEED)
    if path.exists():
        lengths = json.loads(path.read_text())["rows"][:count]
    else:  # about as long
        lengths = [(rng.randrange(40, 160), rng.randrange(40, 200)) for _ in range(count or 7473)]

    def words(length: int) -> str:
        return " ".join(str(rng.randrange(1, WORDS)) for _ in range(max(2, length // divisor)))

    rows = [(words(prompt), words(answer - 1)) for prompt, answer in lengths]
    return [(prompt, answer, rows[index - 1][1]) for index, (prompt, answer) in enumerate(rows)]


def save_number_tokenizer(folder: Path, count: int = WORDS) -> Any:
    """A tokenizer whose words are numbers, so that lengths are exact; EOS comes last."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=EOS, pad_token=EOS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_tokenizer_and_config(folder: Path, shape: str) -> None:
    """The tokenizer and the config of a shape, without weights."""
    from transformers import AutoConfig

    tokenizer, (model_type, sizes) = save_number_tokenizer(folder), SHAPES[shape]
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoConfig.for_model(model_type, **sizes, **ids).save_pretrained(folder)


def save_recipe(work: Work, changes: dict[str, Any]) -> Path:
    """The recipe of a case and its rows; all that is not set is a default."""
    stage, names = work.case.stage, ("prompt", "completion" if work.case.stage == "sft" else "chosen", "rejected")
    rows = [dict(zip(names[: 2 + (stage == "dpo")], texts, strict=False)) for texts in work.texts]
    (work.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "num_train_epochs": EPOCHS, "per_device_train_batch_size": work.case.rows, "max_length": MAX_LENGTH,
        "learning_rate": LEARNING_RATE, **work.case.settings, **changes,
    }  # fmt: skip
    path = work.folder / "recipe.yaml"
    model, data = str(work.folder), {"train_file": str(work.folder / "rows.jsonl"), "test_size": 4}
    recipe = {"name": "mixed", "model": {"model_name_or_path": model}, "data": data, "report_to": "none"}
    path.write_text(json.dumps({**recipe, stage: settings}))
    return path


def train_ours(work: Work, changes: dict[str, Any]) -> Figures:
    """The engine with the plan that `modelwright run` makes; reference log-probs of DPO are zeros."""
    import numpy as np
    import torch

    from modelwright.engine.distributed import World
    from modelwright.plan.hardware import gpu_spec_of, probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.load import load
    from modelwright.runs.folder import RunFolder
    from modelwright.runs.journal import Journal
    from modelwright.stages.context import DEFAULT_OPTIONS, RunContext
    from modelwright.stages.measure import load_random_model
    from modelwright.stages.planning import build_engine, fit_plan
    from modelwright.stages.specs import BUILDERS

    began, stage, run = time.perf_counter(), work.case.stage, work.folder / "run"
    torch.manual_seed(SEED)
    loaded, folder = load(save_recipe(work, changes), [f"output_dir={run}"]), RunFolder(run)
    folder.create()
    context = RunContext(loaded, folder, Journal(None), World(device=work.device), probe_device(), DEFAULT_OPTIONS)
    inputs = replace(BUILDERS[stage].load_inputs(context, stage, None), load_model=load_random_model)
    parts = BUILDERS[stage].build(context, inputs, stage)
    plan = plan_stage(context.recipe.stages[stage], parts.task.epoch_rows, 1, context.hardware)
    plan = fit_plan(plan, stage, parts, context)
    engine = build_engine(plan, stage, parts, context)
    if stage == "dpo":
        task: Any = parts.task
        answers = [pair.chosen.loss_mask.sum() + pair.rejected.loss_mask.sum() for pair in task.train_set.rows]
        task.ref_logps = {"train": [np.zeros(count, dtype=np.float32) for count in answers], "held_out": []}
    else:
        parts.precompute(engine, folder.frozen_cache(stage))
    _forget_peak()
    times = train_engine(_Stopped(engine, work.steps), work.steps, began)
    figures, prediction = work.timed(times), plan.prediction or {}
    tokens = times.tokens[len(times.tokens) // 2 :]
    rate = sum(tokens) / len(tokens) / figures["step_seconds"]
    peak = gpu_spec_of(context.hardware).bf16 if work.device.type == "cuda" else None
    return {
        **figures,
        "tokens_per_second": round(rate),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if work.device.type == "cuda" else None,
        "mfu": round(rate * parts.flops_per_token(plan) / peak, 4) if peak else None,
        "predicted_step_seconds": prediction.get("step_seconds") or _predicted_seconds(prediction, tokens),
        "predicted_memory_gb": _predicted_memory(prediction),
        "graphs": [len(call._graphs) for call in (engine._first_backward, engine._next_backward)],
        "plan": [plan.batch_arithmetic, *engine.plan.reasons],
        "notes": list(engine.notes),
    }


def _forget_peak() -> None:
    """Measure the memory of the steps, not of the random fp32 weights before them."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _predicted_seconds(prediction: Figures, tokens: Sequence[int]) -> float | None:
    """A step's seconds by the predicted rate, for plans that hold only that."""
    rate = prediction.get("tokens_per_second")
    return round(sum(tokens) / len(tokens) / rate, 5) if rate else None


def _predicted_memory(prediction: Figures) -> float | None:
    """GB at the predicted peak of a step; here no model is loaded from a file, and nothing is evaluated."""
    phases = prediction.get("memory", {}).get("phases", {})
    steps = [size for name, size in phases.items() if name not in ("loading", "evaluation")]
    return round(max(steps) / 1e9, 4) if steps else None


@dataclass(frozen=True)
class _Stopped:
    """An engine that stops early: the plan knows the declared number of steps."""

    engine: Any
    count: int

    def steps(self) -> Iterator[Any]:
        """The first steps."""
        for number, report in enumerate(self.engine.steps(), 1):
            yield report
            if number == self.count:
                return


def train_trl(work: Work, settings: dict[str, Any]) -> Figures:
    """TRL with bf16 weights, its default, on the rows of our last steps in our order."""
    import torch
    from datasets import Dataset

    from modelwright.models import pretrained
    from modelwright.stages.measure import load_random_model

    began, case, on_gpu = time.perf_counter(), work.case, work.device.type == "cuda"
    rows = in_engine_order(work.texts, case.rows, work.steps)[-case.rows * work.peer_steps :]
    torch.manual_seed(SEED)
    model = load_random_model(work.folder, "sdpa", "none", work.device)
    model = model.to(torch.bfloat16) if on_gpu else model
    _forget_peak()
    arguments = {
        "max_steps": work.peer_steps, "per_device_train_batch_size": case.rows, "max_length": MAX_LENGTH,
        "learning_rate": LEARNING_RATE, "bf16": on_gpu, "use_cpu": not on_gpu, "gradient_checkpointing": False,
        **settings,
    }  # fmt: skip
    common_arguments = {"model": model, "processing_class": pretrained.load_tokenizer(work.folder)}
    if case.stage == "dpo":
        from trl import DPOConfig, DPOTrainer

        data = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows])
        reference = copy.deepcopy(model)
        times, _ = train_peer(
            DPOTrainer, DPOConfig, arguments, began, **common_arguments, ref_model=reference, train_dataset=data
        )
    else:
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"prompt": prompt, "completion": f" {answer}"} for prompt, answer, _ in rows])
        if case.is_lora:
            from peft import LoraConfig

            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            common_arguments["peft_config"] = config
        times, _ = train_peer(SFTTrainer, SFTConfig, arguments, began, **common_arguments, train_dataset=data)
    return work.timed(times)


def measure_case(
    name: str, changes: dict[str, Any], peers: bool, steps: int, device: str, texts: list[Texts]
) -> Figures:
    """Ours and the peers, one after the other in this process; one that fails says why."""
    import torch

    case = replace(ALL_CASES[name], shape="tiny", rows=4) if device == "cpu" else ALL_CASES[name]
    figures: Figures = {"case": name, "settings": changes, "rows_a_step": case.rows, "device": device}
    sides: list[tuple[str, dict[str, Any] | None]] = [("ours", None)]
    if peers and common.installed("trl"):
        sides += [(peer, settings) for peer, settings in PEERS.items() if "liger" not in peer or _has_liger()]
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer_and_config(Path(folder), case.shape)
        work = Work(case, steps, max(2, steps // 2), torch.device(device), Path(folder), texts)
        for side, settings in sides:
            free_device()
            began = time.perf_counter()
            try:
                figures[side] = train_ours(work, changes) if settings is None else train_trl(work, settings)
            except Exception as error:
                if os.environ.get("MIXED_LENGTHS_DEBUG"):
                    raise
                figures[side] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            figures[side]["wall_seconds"] = round(time.perf_counter() - began, 1)
            brief = {key: value for key, value in figures[side].items() if not isinstance(value, list)}
            print(f"{name}, {side}: {brief}", file=sys.stderr, flush=True)
    rates = [each["rows_per_second"] for side in PEERS if "rows_per_second" in (each := figures.get(side, {}))]
    if rates and "rows_per_second" in figures["ours"]:
        figures["ratio"] = round(figures["ours"]["rows_per_second"] / max(rates), 2)
    return figures


def _parsed(value: str) -> Any:
    """A number, true, false or null as in a recipe, else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _has_liger() -> bool:
    return common.installed("liger-kernel") is not None


HEADER = (
    "case", "rows/s", "TRL", "TRL + liger", "ratio", "tokens/s", "MFU", "s a step", "median", "predicted", "off",
    "GB", "predicted", "off", "TRL GB", "s to step 2", "graphs",
)  # fmt: skip


def table(results: Sequence[Figures]) -> str:
    """A line for each case."""
    lines = []
    for result in results:
        ours, (plain, liger) = result.get("ours", {}), (result.get(peer, {}) for peer in PEERS)
        seconds, median, memory = (ours.get(key) for key in ("step_seconds", "median_step_seconds", "memory_gb"))
        predicted, predicted_memory = ours.get("predicted_step_seconds"), ours.get("predicted_memory_gb")
        failed = ours.get("failed") or result.get("failed")
        cells = [
            label(result), failed or ours.get("rows_per_second"), plain.get("rows_per_second"),
            liger.get("rows_per_second"), result.get("ratio"), ours.get("tokens_per_second"), ours.get("mfu"), seconds,
            median, predicted, _off(predicted, median), memory, predicted_memory, _off(predicted_memory, memory),
            plain.get("memory_gb"), ours.get("start_seconds"), "+".join(map(str, ours.get("graphs", []))),
        ]  # fmt: skip
        lines.append(["–" if cell is None else str(cell) for cell in cells])
    return markdown_table(HEADER, lines)


def _off(predicted: float | None, actual: float | None) -> str | None:
    return f"{predicted / actual - 1:+.0%}" if predicted and actual else None


def run_in_process(name: str, options: Sequence[str]) -> Figures:
    """A case in a process of its own, which leaves no memory and no compiled code behind."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.mixed_lengths", name, *options, "--out", folder]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, check=False).returncode
        paths = list(Path(folder).glob("*.json"))
        if not paths:
            return {"case": name, "failed": f"exit {code}"}
        result: Figures = json.loads(paths[0].read_text())
        return result


def label(result: Figures) -> str:
    """The case and what was set by hand."""
    settings = [f"{key}={json.dumps(value)}" for key, value in result.get("settings", {}).items()]
    return ", ".join([result["case"], *settings])


def flag_lines(results: Sequence[Figures]) -> Iterator[str]:
    """For each case, its default beside the fastest of the flags."""
    rates: dict[str, dict[str, float]] = {}
    for result in results:
        if rate := result.get("ours", {}).get("rows_per_second"):
            rates.setdefault(result["case"], {})[label(result)] = rate
    for case, by_label in rates.items():
        if case in by_label and len(by_label) > 1:
            best = max((name for name in by_label if name != case), key=by_label.__getitem__)
            yield f"{case}: the default reaches {by_label[case] / by_label[best]:.0%} of the best flags ({best})"


def main(
    cases: Annotated[list[str], typer.Argument(help=f"Any of {', '.join(ALL_CASES)}; or all, or unfitted.")],
    changes: Annotated[list[str] | None, typer.Option("--with", help="A setting of our stage: KEY=VALUE.")] = None,
    flags: Annotated[bool, typer.Option("--flags", help="Also with flags set by hand, without peers.")] = False,
    peers: Annotated[bool, typer.Option(help="Train TRL too, plain and with liger.")] = True,
    steps: Annotated[int, typer.Option(help="Steps of ours; peers train half as many.")] = 60,
    device: Annotated[str, typer.Option(help="cuda, or cpu: a tiny model and short rows, to try the command.")] = "",
    out: Annotated[Path | None, typer.Option(help="A folder for the figures, a JSON file for each case.")] = None,
) -> None:
    """Rate, memory and prediction of our default settings on rows of every length, and TRL's beside them."""
    import torch

    names = [name for case in cases for name in {"all": CASES, "unfitted": UNFITTED}.get(case, [case])]
    if unknown := [name for name in names if name not in ALL_CASES]:
        raise UsageError(f"there is no case {unknown[0]!r}; there are: {', '.join(ALL_CASES)}, or all, or unfitted")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    variants = [tuple(changes or ())] + ([(*(changes or ()), *flag) for flag in FLAGS] if flags else [])
    results: list[Figures] = []
    for name, variant in ((name, variant) for name in names for variant in variants):
        with_peers = peers and not flags and name in CASES
        if len(names) * len(variants) == 1:
            settings = {key: _parsed(value) for key, _, value in (change.partition("=") for change in variant)}
            texts = row_texts(*((200, 8) if device == "cpu" else (None, 1)))
            results.append(measure_case(name, settings, with_peers, steps, device, texts))
        else:
            options = [option for change in variant for option in ("--with", change)]
            options += ["--steps", str(steps), "--device", device, "--peers" if with_peers else "--no-peers"]
            results.append(run_in_process(name, options))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{len(results):02}-{name}.json").write_text(json.dumps(results[-1], indent=1))
    for result in results:
        for line in result.get("ours", {}).get("plan", []):
            print(f"{label(result)}: {line}")
    print("\n".join([table(results), *flag_lines(results)]))


if __name__ == "__main__":
    common.run(main)
