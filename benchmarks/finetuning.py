"""Fine-tuning workloads of benchmarks.speed: SFT, DPO, the survival fine-tune, and a small SFT on a CPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common, peer_trainers, workloads
from benchmarks.common import KernelProfile, ratio, require_finite, run_variants, select_variants, variant_lines
from benchmarks.peer_trainers import StepTimes, in_engine_order, make_engine, torch_device, train_engine, train_peer
from benchmarks.workloads import VARIANTS, DpoWorkload, SftScenario, Variant
from modelwright.errors import UsageError

Figures = dict[str, Any]
SFT_LEARNING_RATE, DPO_LEARNING_RATE, SURVIVAL_LEARNING_RATE = 2e-5, 1e-6, 5e-5
SFT_BATCH = {"smollm3": (16, 2), "tiny": (2, 2)}
"""The peer's micro-batch size and accumulation; ours takes the same step as one micro-batch."""
MAX_LOSS_GAP = 0.01
"""How far apart the mean losses of DPO variants may be."""
LAST_TWO_LAYERS: Any = {"last_layers": 2, "lm_head": True, "untie_lm_head": True}
WARM_UP_STEPS, TIMED_STEPS, SMALL_BATCH, ROUNDS = 3, 12, 8, 2
"""Of the small SFT."""


@dataclass(frozen=True)
class BenchSetup:
    """What every SFT variant gets."""

    scenario: SftScenario
    """The shape and batch."""
    rows: Any
    """Conversations."""
    folder: Path
    """The tokenizer."""
    steps: int
    """Steps of each variant."""


def measure_sft(variants: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> Figures:
    """SFT of all weights against TRL's SFTTrainer; where the peer packs, it decides which rows make a step."""
    shape = "smollm3" if torch_device().type == "cuda" else "tiny"
    selected = _installed(select_variants(VARIANTS["sft" if shape == "smollm3" else "sft-tiny"], variants))
    micro_batch, accumulation = SFT_BATCH[shape]
    scenario = SftScenario(shape, None if shape == "smollm3" else 12, micro_batch * accumulation, 1, steps)
    with tempfile.TemporaryDirectory() as folder:
        rows = workloads.scenario_conversations(scenario, data)
        workloads.save_scenario_tokenizer(scenario, rows, Path(folder))
        setup = BenchSetup(scenario, rows, Path(folder), steps)

        def train(variant: Variant, profile: KernelProfile) -> Figures:
            ours = variant.peer is None
            step_rows, times = sft_modelwright(setup, variant, profile) if ours else sft_trl(setup, variant)
            require_finite(times.losses)
            return {
                "rows_per_second": round(step_rows / times.step_seconds, 2), "rows_a_step": round(step_rows, 2),
                **times.summary(), "losses": [round(loss, 4) for loss in times.losses],
            }  # fmt: skip

        measured = run_variants(selected, kernels, train)
    return {"shape": shape, "rows": len(rows.train), "variants": measured, **ratio(measured, "rows_per_second")}


def sft_lines(figures: Figures) -> Iterator[str]:
    """The table."""
    yield f"  full fine-tune of the {figures['shape']} shape, {figures['rows']} questions and answers"

    def line(_: str, variant: Figures) -> str:
        return (
            f"{variant['rows_per_second']:,.1f} rows/s, {variant['rows_a_step']:.1f} rows a step, "
            f"{variant['memory_gb']:.1f} GB, {variant['start_seconds']:.0f} s to start, "
            f"loss {variant['losses'][0]:.3f} → {variant['losses'][-1]:.3f}"
        )

    yield from variant_lines(figures, line)


def sft_modelwright(setup: BenchSetup, variant: Variant, profile: KernelProfile) -> tuple[float, StepTimes]:
    """Our engine; rows per step, and the times."""
    from modelwright.recipe.stage_specs import SftConfig

    began = time.perf_counter()
    settings = SftConfig.model_validate({
        "max_steps": setup.steps, "learning_rate": SFT_LEARNING_RATE, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": setup.scenario.batch, "max_length": 1024, **variant.settings,
    })  # fmt: skip
    task, _ = _sft_task(setup.scenario, setup.rows, setup.folder, settings)
    rows_per_row = len(task.train_set.rows) / task.rows
    if settings.packing:
        batch = max(1, round(setup.scenario.batch / rows_per_row))
        settings = settings.model_copy(update={"per_device_train_batch_size": batch})
    engine = make_engine(task, settings)
    return engine.plan.global_batch_size * rows_per_row, train_engine(engine, setup.steps, began, profile)


def _sft_task(scenario: SftScenario, rows: Any, folder: Path, settings: Any) -> tuple[Any, float]:
    """The SFT task of a scenario, and when its model was loaded."""
    from modelwright.models import pretrained
    from modelwright.tasks.sft import SftTask

    model = workloads.load_scenario_model(scenario, folder, torch_device(), settings)
    pretrained.prepare_model(model, torch_device(), "auto")
    loaded = common.now()
    tokenizer = pretrained.load_tokenizer(folder)
    return SftTask(model, tokenizer, rows, settings, pretrained.eos_token_ids(model)), loaded


def sft_trl(setup: BenchSetup, variant: Variant) -> tuple[float, StepTimes]:
    """TRL's trainer on the same rows in our order."""
    import torch

    from modelwright.recipe.stage_specs import SftConfig

    began, scenario, settings = time.perf_counter(), setup.scenario, variant.peer or {}
    packs = bool(settings.get("packing"))
    # packed rows hold several: enough of them for every step
    rows = in_engine_order(setup.rows.train, scenario.batch, setup.steps * (3 if packs else 1))
    # several packed rows at once would become one with a mask of all by all: the peer is faster a row at a time
    micro_batch, accumulation = (1, max(1, scenario.batch // 10)) if packs else SFT_BATCH[scenario.shape]
    model = workloads.load_scenario_model(scenario, setup.folder, torch_device(), SftConfig())
    model = model.to(torch.bfloat16) if variant.bf16_weights else model
    times, trainer = train_trl_sft(began, model, setup.folder, rows, {
        "max_steps": setup.steps, "learning_rate": SFT_LEARNING_RATE, "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation, "max_length": 1024, **settings,
    })  # fmt: skip
    return micro_batch * accumulation * len(rows) / len(trainer.train_dataset), times


def train_trl_sft(
    began: float, model: Any, tokenizer: Path, rows: list[Any], settings: Figures
) -> tuple[StepTimes, Any]:
    """TRL's SFTTrainer on conversations in this order."""
    from trl import SFTConfig, SFTTrainer

    from modelwright.models import pretrained

    return train_peer(
        SFTTrainer, SFTConfig, settings, began, model=model, train_dataset=peer_trainers.conversation_dataset(rows),
        processing_class=pretrained.load_tokenizer(tokenizer),
    )  # fmt: skip


def measure_dpo(variants: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> Figures:
    """DPO against TRL's DPOTrainer, with cached reference log-probs and with a second model in memory."""
    if data is not None:
        raise UsageError("--rows is not for dpo: its pairs are random, so that their lengths are exact")
    gpu = torch_device().type == "cuda"
    work = "dpo" if gpu else "dpo-tiny"
    selected, workload = _installed(select_variants(VARIANTS[work], variants)), workloads.DPO[work]
    with tempfile.TemporaryDirectory() as folder:
        workloads.save_dpo_model(Path(folder), workload)

        def train(variant: Variant, profile: KernelProfile) -> Figures:
            arguments = workload, variant, Path(folder), steps
            reference, times = dpo_trl(*arguments) if variant.peer else dpo_modelwright(*arguments, profile)
            require_finite(times.losses)
            return {
                "pairs_per_second": round(workload.pairs / times.step_seconds, 3), **times.summary(),
                "reference_seconds": round(reference, 2), "mean_loss": round(times.mean_loss, 5),
            }  # fmt: skip

        measured = run_variants(selected, kernels, train)
    setting = f"{workload}, {'bf16 arithmetic' if gpu else 'fp32, pairs per CPU-second'}"
    return {"setting": setting, "variants": measured, **ratio(measured, "pairs_per_second")}


def dpo_lines(figures: Figures) -> Iterator[str]:
    """The table."""
    yield f"  {figures['setting']}"

    def line(_: str, variant: Figures) -> str:
        return (
            f"{variant['pairs_per_second']:,.2f} pairs/s, {variant['memory_gb']:.1f} GB, "
            f"{variant['start_seconds']:.0f} s to start, {variant['reference_seconds']:.1f} s of them the reference, "
            f"mean loss {variant['mean_loss']:.4f}"
        )

    yield from variant_lines(figures, line)
    losses = [variant["mean_loss"] for variant in figures["variants"].values() if "failed" not in variant]
    if losses and max(losses) - min(losses) > MAX_LOSS_GAP:
        yield f"  the variants do not train the same: their losses are {max(losses) - min(losses):.3f} apart"


def dpo_modelwright(
    workload: DpoWorkload, variant: Variant, folder: Path, steps: int, profile: KernelProfile
) -> tuple[float, StepTimes]:
    """Our engine, the prompt computed once for both answers; seconds of the reference, and the times."""
    from modelwright.data.preferences import PreferenceDataset, PreferencePair
    from modelwright.models import pretrained
    from modelwright.recipe.stage_specs import DpoConfig
    from modelwright.tasks.dpo import DpoTask, precompute_ref_log_probs

    def message(role: str, text: str) -> tuple[dict[str, str], ...]:
        return ({"role": role, "content": text},)

    began = peer_trainers.cpu_or_gpu_seconds()
    pairs = [
        PreferencePair(
            str(row), message("user", prompt), message("assistant", chosen), message("assistant", rejected), prompt
        )
        for row, (prompt, chosen, rejected) in enumerate(workloads.preference_texts(workload, steps))
    ]
    model = pretrained.load_model(folder)
    pretrained.prepare_model(model, torch_device(), "auto")
    settings = DpoConfig.model_validate({
        "max_steps": steps, "per_device_train_batch_size": workload.pairs, "lr_scheduler_type": "constant",
        "per_device_eval_batch_size": workload.pairs, "max_length": workload.max_length,
        "learning_rate": DPO_LEARNING_RATE, **variant.settings,
    })  # fmt: skip
    task = DpoTask(model, pretrained.load_tokenizer(folder), PreferenceDataset(pairs, [], ""), settings, ())
    assert task.sharing_blocker is None or not settings.share_prompt, task.sharing_blocker
    engine = make_engine(task, settings)
    loaded = peer_trainers.cpu_or_gpu_seconds()
    precompute_ref_log_probs(task, engine, folder / f"reference of {variant.name}", "random")
    reference = peer_trainers.cpu_or_gpu_seconds() - loaded
    return reference, train_engine(engine, steps, began, profile, peer_trainers.cpu_or_gpu_seconds)


def dpo_trl(workload: DpoWorkload, variant: Variant, folder: Path, steps: int) -> tuple[float, StepTimes]:
    """TRL's trainer on the same pairs in our order; with a second model, the reference is the time to load it."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from modelwright.models import pretrained

    began, gpu = peer_trainers.cpu_or_gpu_seconds(), torch_device().type == "cuda"
    rows = in_engine_order(workloads.preference_texts(workload, steps), workload.pairs, steps)
    settings = {
        "max_steps": steps, "per_device_train_batch_size": workload.pairs, "max_length": workload.max_length,
        "precompute_ref_batch_size": workload.pairs, "beta": 0.1, "learning_rate": DPO_LEARNING_RATE,
        "use_cpu": not gpu, "bf16": gpu, "gradient_checkpointing": False, **(variant.peer or {}),
    }  # fmt: skip
    data = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows])
    model, tokenizer = pretrained.load_model(folder), pretrained.load_tokenizer(folder)
    loaded = peer_trainers.cpu_or_gpu_seconds()
    times, trainer = train_peer(
        DPOTrainer, DPOConfig, settings, began, peer_trainers.cpu_or_gpu_seconds,
        model=model, processing_class=tokenizer, train_dataset=data,
    )  # fmt: skip
    first = trainer.train_dataset[0]
    assert (len(first["prompt_ids"]), len(first["chosen_ids"])) == (workload.prompt, workload.answer + 1)
    return began + times.before - loaded, times


def measure_survival(
    scenario: SftScenario, variants: Sequence[str], steps: int, data: Path | None, kernels: bool = False
) -> Figures:
    """The last two layers and the head: ours with cached frozen layers and prefix sharing, without both, and TRL.

    Everything after loading the model counts: tokenizing, the frozen layers, every step.
    """
    if variants:
        raise UsageError("--variant is not for survival: all of its variants are compared")
    rows = workloads.scenario_conversations(scenario, data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workloads.save_scenario_tokenizer(scenario, rows, folder)
        total = -(-len(rows.train) * scenario.epochs // scenario.batch)
        cached, notes = survival_modelwright(scenario, rows, folder, total)
        plain, _ = survival_modelwright(
            scenario, rows, folder, scenario.compared_steps, cache_frozen_layers="off", share_prefix=False
        )
        require_finite([*cached.losses, *plain.losses])
        peer = survival_trl(scenario, rows, folder) if common.installed("trl") else None
    figures = survival_figures(scenario, len(rows.train), (cached, plain, peer))
    figures["modelwright"]["notes"] = list(notes)
    return figures


def survival_modelwright(
    scenario: SftScenario, rows: Any, folder: Path, steps: int, **reuse: Any
) -> tuple[StepTimes, tuple[str, ...]]:
    """Our engine, timed from when the model is loaded; and what it reuses."""
    from modelwright.recipe.stage_specs import SftConfig
    from modelwright.tasks.sft import find_compute_reuse

    settings = SftConfig(
        trainable=LAST_TWO_LAYERS, per_device_train_batch_size=scenario.batch, max_steps=steps, max_length=1024,
        learning_rate=SURVIVAL_LEARNING_RATE, lr_scheduler_type="constant", **reuse,
    )  # fmt: skip
    task, loaded = _sft_task(scenario, rows, folder, settings)
    compute_reuse = find_compute_reuse(task, task.module.model, settings)
    engine = make_engine(task, settings)
    note = compute_reuse.precompute(engine, folder / "frozen-layers", "bench")
    times = train_engine(engine, steps, loaded)
    return times, (*compute_reuse.describe(engine.plan), *([note] if note else []))


def survival_trl(scenario: SftScenario, rows: Any, folder: Path) -> StepTimes:
    """TRL's trainer: the same model, trainable weights, rows, order and precision; padded, as its users run it."""
    from modelwright.recipe.stage_specs import SftConfig

    began, gpu = time.perf_counter(), torch_device().type == "cuda"
    model = workloads.load_scenario_model(scenario, folder, torch_device(), SftConfig(trainable=LAST_TWO_LAYERS))
    ordered = in_engine_order(rows.train, scenario.batch, scenario.compared_steps)
    return train_trl_sft(began, model, folder, ordered, {
        "max_steps": scenario.compared_steps, "per_device_train_batch_size": scenario.batch, "max_length": 1024,
        "learning_rate": SURVIVAL_LEARNING_RATE, "use_cpu": not gpu, "bf16": gpu, "gradient_checkpointing": False,
    })[0]  # fmt: skip


def survival_figures(scenario: SftScenario, rows: int, runs: tuple[StepTimes, StepTimes, StepTimes | None]) -> Figures:
    """Of our run with reuse, without it, and of the peer."""
    cached, plain, peer = runs
    trained_rows, seconds = rows * scenario.epochs, cached.before + sum(cached.seconds)
    rate, plain_rate = (scenario.batch / times.median_after_first for times in (cached, plain))
    figures: Figures = {
        "setting": f"{scenario.shape}: last 2 layers and an untied head, {scenario.batch} rows a step",
        "rows": rows,
        "epochs": scenario.epochs,
        "modelwright": {
            "seconds": round(seconds, 2),
            "seconds_before": round(cached.before, 2),
            "rows_per_second": round(rate, 2),
            "overall_rows_per_second": round(trained_rows / seconds, 2),
            "seconds_of_steps": round(sum(cached.seconds), 2),
            "slowest_steps": sorted((round(each, 3) for each in cached.seconds), reverse=True)[:12],
            "losses": cached.losses,
        },
        "without savings": {"rows_per_second": round(plain_rate, 2), "losses": plain.losses},
        "largest_loss_difference": max(abs(a - b) for a, b in zip(cached.losses, plain.losses, strict=False)),
    }
    if peer is not None:
        peer_rate = scenario.batch / peer.median_after_first
        extrapolated = round(trained_rows / peer_rate, 1)
        figures["trl"] = {
            "rows_per_second": round(peer_rate, 2), "seconds_extrapolated": extrapolated, "losses": peer.losses,
            "overall_rows_per_second": round(scenario.batch * len(peer.seconds) / sum(peer.seconds), 2),
        }  # fmt: skip
        figures |= {"ratio": round(extrapolated / seconds, 2), "ratio_of_steps": round(rate / peer_rate, 2)}
    return figures


def survival_lines(figures: Figures) -> Iterator[str]:
    """The figures as sentences."""
    ours, plain = figures["modelwright"], figures["without savings"]
    yield figures["setting"]
    yield from ours["notes"]
    yield (
        f"modelwright      {ours['seconds']:.1f} s for {figures['rows']} rows × {figures['epochs']} epochs: "
        f"{ours['seconds_before']:.1f} s before the first step, then {ours['rows_per_second']:.1f} rows/s; "
        f"{ours['overall_rows_per_second']:.1f} rows/s over all"
    )
    yield (
        f"without reuse    {plain['rows_per_second']:.1f} rows/s; its first {len(plain['losses'])} losses differ by "
        f"{figures['largest_loss_difference']:.2e} at most"
    )
    if "trl" not in figures:
        yield common.NO_TRL
        return
    peer = figures["trl"]
    yield (
        f"trl              {peer['rows_per_second']:.1f} rows/s, so about {peer['seconds_extrapolated']:.0f} s for all "
        f"(extrapolated from {len(peer['losses'])} steps)"
    )
    yield (
        f"ratio {figures['ratio']:.1f} with the frozen layers counted, {figures['ratio_of_steps']:.1f} in the steps "
        "alone (above 1: ours is faster)"
    )


def measure_small_sft(variants: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> Figures:
    """A small Llama in fp32 against TRL's SFTTrainer: the same batches; each round in the other order."""
    from modelwright.data import chat
    from modelwright.recipe.sections import CountOrFraction, DataConfig

    if variants:
        raise UsageError("--variant is not for sft-small: both of its variants are compared")
    total = WARM_UP_STEPS + TIMED_STEPS
    config = DataConfig(
        dataset_name="field-guide", columns={"question": "prompt", "answer": "completion"},
        max_rows=total * SMALL_BATCH + 1, test_size=CountOrFraction(1),
    )  # fmt: skip
    conversations = chat.load_conversations(config, workloads.SEED, Path())
    ours: list[StepTimes] = []
    peer: list[StepTimes] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workloads.save_small_model(
            folder, [message["content"] for item in conversations.train for message in item.messages]
        )
        for number in range(ROUNDS):
            for is_ours in (True, False) if number % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(small_sft_modelwright(folder, conversations, total))
                elif common.installed("trl"):
                    peer.append(small_sft_trl(folder, conversations, total))
    size = f"8-layer Llama of width 256, batch {SMALL_BATCH}"
    setting = f"{size}, fp32, CPU, median of {TIMED_STEPS} steps x {ROUNDS} rounds"
    figures: Figures = {"setting": setting, "modelwright": _small_figures(ours)}
    if peer:
        assert ours[0].tokens == peer[0].tokens, "the two sides did not see the same tokens"
        figures["trl"] = _small_figures(peer)
        rates = [figures[side]["tokens_per_second"] for side in ("modelwright", "trl")]
        figures["ratio"] = round(rates[0] / rates[1], 3)
    return figures


def small_sft_modelwright(folder: Path, conversations: Any, steps: int) -> StepTimes:
    """Our engine on one device in fp32."""
    from modelwright.models import pretrained
    from modelwright.recipe.stage_specs import SftConfig
    from modelwright.tasks.sft import SftTask

    model = pretrained.load_model(folder)
    settings = SftConfig(
        max_steps=steps, per_device_train_batch_size=SMALL_BATCH, max_length=workloads.SMALL_LENGTH, precision="fp32",
        learning_rate=1e-4, lr_scheduler_type="constant",
    )  # fmt: skip
    eos = pretrained.eos_token_ids(model)
    task = SftTask(model, pretrained.load_tokenizer(folder), conversations, settings, eos)
    return train_engine(make_engine(task, settings), steps, time.perf_counter())


def small_sft_trl(folder: Path, conversations: Any, steps: int) -> StepTimes:
    """TRL's trainer on the same rows in our order."""
    from modelwright.models import pretrained

    rows = in_engine_order(conversations.train, SMALL_BATCH, steps)
    times, trainer = train_trl_sft(time.perf_counter(), pretrained.load_model(folder), folder, rows, {
        "max_steps": steps, "per_device_train_batch_size": SMALL_BATCH, "max_length": workloads.SMALL_LENGTH,
        "learning_rate": 1e-4, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    })  # fmt: skip
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    batches = range(0, steps * SMALL_BATCH, SMALL_BATCH)
    return replace(times, tokens=tuple(sum(lengths[start : start + SMALL_BATCH]) for start in batches))


def _small_figures(rounds: list[StepTimes]) -> Figures:
    rates = [
        [tokens / seconds for tokens, seconds in zip(times.tokens, times.seconds, strict=True)][WARM_UP_STEPS:]
        for times in rounds
    ]
    return {
        "tokens_per_second": round(median(rate for each in rates for rate in each), 1),
        "rounds": [round(median(each), 1) for each in rates],
        "tokens": sum(rounds[0].tokens[WARM_UP_STEPS:]),
        "mean_loss": round(rounds[0].mean_loss, 5),
    }


def small_sft_lines(figures: Figures) -> Iterator[str]:
    """The figures as sentences."""
    for name in ("modelwright", "trl"):
        if name in figures:
            side = figures[name]
            yield f"{name:<11} {side['tokens_per_second']:,.0f} tokens/s, mean loss {side['mean_loss']:.4f}"
    if "trl" in figures:
        yield f"ratio {figures['ratio']:.2f} (above 1: ours is faster), {figures['setting']}"
    else:
        yield common.NO_TRL


def _installed(variants: list[Variant]) -> list[Variant]:
    """Without those of a peer that is not installed."""
    return [variant for variant in variants if variant.peer is None or common.installed("trl")]
