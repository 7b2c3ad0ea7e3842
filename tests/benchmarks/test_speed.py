"""Benchmarks measure what they say, and their figures carry what they stand on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import common, finetuning, peer_trainers, speed, startup
from benchmarks.common import environment
from benchmarks.workloads import DPO, VARIANTS, WORKLOADS, DpoWorkload, random_llama, token_rows
from modelwright.errors import UsageError


def test_a_result_carries_day_commit_and_machine_but_not_its_name() -> None:
    result = common.result("start", {"help": 1.0})
    assert result["date"].endswith("+00:00")
    assert set(result["machine"]) >= {"architecture", "cpu", "cores", "python", "torch"}
    assert socket.gethostname() not in json.dumps(result["machine"])


def test_a_result_is_kept_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    path = common.save(common.result("start", {"help": 1.0}))
    assert path == tmp_path / "benchmarks" / "results" / "start.json"
    assert json.loads(path.read_text(encoding="utf-8"))["figures"] == {"help": 1.0}


def test_the_cost_of_a_command_is_its_cpu_time_and_its_last_words() -> None:
    idle = startup.cost([sys.executable, "-c", "import time; time.sleep(0.3); print('slept')"])
    busy = startup.cost([sys.executable, "-c", "sum(range(20_000_000)); raise SystemExit('summed')"])
    assert idle["cpu_seconds"] < busy["cpu_seconds"]
    assert (idle["last_line"], idle["exit_code"]) == ("slept", 0)
    assert (busy["last_line"], busy["exit_code"]) == ("summed", 1)


def test_a_missing_peer_is_said() -> None:
    alone = {"help": {"modelwright": {"cpu_seconds": 0.2}}}
    assert startup.lines(alone) == [
        "help: modelwright 0.20 CPU-s; trl is not installed, so there is nothing to compare with"
    ]
    figures = {"help": {"modelwright": {"cpu_seconds": 0.2}, "trl": {"cpu_seconds": 8.0}, "ratio": 40.0}}
    assert startup.lines(figures) == ["help: modelwright 0.20 CPU-s, trl sft 8.00 CPU-s, 40 times as much"]


def test_an_answer_to_another_question_is_held_against_nothing() -> None:
    ours, theirs = startup.cost([sys.executable, "-c", "print('learning_rat is unknown')"]), {"cpu_seconds": 9.0}
    elsewhere = {**theirs, "last_line": "there is no GPU"}
    figures = {
        "typo": {"modelwright": ours, "trl": elsewhere, "ratio": startup._ratio(ours, elsewhere, "learning_rat")}
    }
    assert figures["typo"]["ratio"] is None
    assert "there is no GPU" in startup.lines(figures)[0]
    assert startup._ratio(ours, {**theirs, "last_line": "unrecognized: --learning_rat"}, "learning_rat")


@pytest.mark.slow
def test_both_sides_of_the_sft_benchmark_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    for name, value in (("WARM_UP_STEPS", 1), ("TIMED_STEPS", 1), ("ROUNDS", 1)):
        monkeypatch.setattr(finetuning, name, value)
    figures = speed.measure("sft-small")
    ours, theirs = figures["modelwright"], figures["trl"]
    assert ours["tokens"] == theirs["tokens"] > 0
    assert ours["mean_loss"] == pytest.approx(theirs["mean_loss"], rel=1e-4)
    assert figures["ratio"] > 0
    assert len(list(speed.lines(figures))) == 4


def test_the_cost_of_a_save_is_what_it_held_up_and_how_much_slower_the_steps_meanwhile_were() -> None:
    steps = [
        {"event": "step", "step": n, "time": 100.0 + n, "step_seconds": 1.5 if n == 3 else 1.0} for n in range(1, 7)
    ]
    saves = [
        {"event": "checkpoint_started", "step": 2, "time": 102.1, "seconds": 0.1},
        {"event": "checkpoint_saved", "step": 2, "time": 103.2, "seconds": 1.1, "blocked_seconds": 0.2},
        {"event": "checkpoint_started", "step": 6, "time": 106.1, "seconds": 5.0},
        {"event": "checkpoint_saved", "step": 6, "time": 111.1, "seconds": 5.0, "blocked_seconds": 5.0},
    ]
    (only,) = startup.save_costs(sorted([*steps, *saves], key=lambda event: event["time"]))
    assert (only["step"], only["still"], only["slower"]) == (2, pytest.approx(0.3), pytest.approx(0.5))
    assert only["share_of_a_minute"] == pytest.approx(0.8 / 60, abs=1e-5)


def test_the_fastest_of_ours_is_held_against_the_fastest_peer() -> None:
    variants = {"ours, a": {"rate": 6.0}, "ours, b": {"rate": 8.0}, "TRL, a": {"rate": 4.0}, "TRL, b": {"failed": "…"}}
    assert common.ratio(variants, "rate") == {"ratio": 2.0}
    assert common.ratio({"ours, a": {"rate": 6.0}}, "rate") == {}


def test_the_speed_of_a_training_whose_loss_is_not_finite_is_not_reported() -> None:
    common.require_finite([3.0, 2.5])
    with pytest.raises(ArithmeticError, match="not finite from step 2 on"):
        common.require_finite([3.0, float("nan"), float("nan")])


def test_lora_is_compared_with_the_peer_and_its_kernels_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = speed.measure("tiny-lora", steps=4, kernels=True)
    ours, theirs = figures["variants"].values()
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["kernels"][0]["name"] == "all together" and "mm" in str(ours["kernels"])
    assert "HF Trainer and PEFT, fp32" in "\n".join(speed.lines(figures))


@pytest.mark.slow
def test_dpo_reaches_the_same_loss_as_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    small = DpoWorkload(layers=2, width=128, vocab_size=256, prompt=24, answer=7, pairs=2)
    monkeypatch.setitem(DPO, "dpo-tiny", small)
    figures = speed.measure("dpo", steps=2)
    ours, saved, second = figures["variants"].values()
    assert ours["mean_loss"] == pytest.approx(saved["mean_loss"], rel=1e-4)
    assert saved["mean_loss"] == pytest.approx(second["mean_loss"], rel=1e-4)
    assert {"pairs_per_second", "memory_gb", "start_seconds"} <= ours.keys() and figures["ratio"] > 0
    assert len(list(speed.lines(figures))) == 6
    second["mean_loss"] += 0.1
    assert "the variants do not train the same" in "\n".join(speed.lines(figures))
    with pytest.raises(UsageError, match="--rows is not for dpo"):
        speed.measure("dpo", steps=2, rows=Path("rows.npy"))


def test_an_optional_variant_is_measured_on_request_and_learns_the_same() -> None:
    plain, again = "ours, fp32", "ours, fp32, selective checkpointing"
    by_default = [variant.name for variant in common.select_variants(VARIANTS["tiny"], ())]
    assert again not in by_default and plain in by_default
    assert [variant.name for variant in common.select_variants(VARIANTS["tiny"], [plain])] == [plain], (
        "a whole name asks for no other"
    )
    figures = speed.measure("tiny", [plain, "selective"], steps=2)
    assert figures["variants"][again]["losses"] == figures["variants"][plain]["losses"]


def test_where_torchtitan_is_absent_it_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_trainers, "installed", lambda package: None)
    monkeypatch.setitem(VARIANTS, "tiny", (VARIANTS["0.5b"][-1], VARIANTS["tiny"][0]))
    figures = speed.measure("tiny", steps=1)
    absent, ours = figures["variants"].values()
    assert absent["failed"].endswith("torchtitan is not installed") and ours["losses"]
    assert f"  torchtitan, fp8, compiled: {absent['failed']}" in list(speed.lines(figures))


def test_torchtitan_is_given_the_same_weights_rows_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    if common.installed("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    if find_spec("triton") is None:  # its kernels for mixtures of experts are asked for at import, and not used here
        kernels = ModuleType("kernels")
        vars(kernels)["generate_permute_indices"] = None
        monkeypatch.setitem(sys.modules, "torchtitan.models.moe.kernels", kernels)
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import Transformer

    work = WORKLOADS["tiny"]
    rows = token_rows(work, 3)
    theirs = Transformer(peer_trainers.titan_shape(work))
    peer_trainers.copy_weights(theirs, work)
    inputs, follows = peer_trainers.titan_batches(work, rows)[0]
    loss = cross_entropy_loss(theirs(inputs["input"]), follows) / (work.rows * (work.length - 1))
    ours = random_llama(work)(input_ids=inputs["input"], labels=inputs["input"]).loss
    assert loss.item() == pytest.approx(ours.item(), rel=1e-5)
    for name in ("0.5b", "6b"):
        for variant in (variant for variant in VARIANTS[name] if variant.titan is not None):
            job = peer_trainers.titan_config(WORKLOADS[name], variant.titan, 64)
            assert job.training.steps * job.training.global_batch_size == 64 and job.compile.enable
            assert bool(job.model.converters) == ("fp8" in variant.name)


def test_the_figures_of_one_workload_are_saved_with_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    for work in ("lora", "sft", "sft"):
        figures = speed.merge_result({"work": work, "device": "a GPU", "variants": {}})
        common.save(common.result("speed", figures))
    saved = common.load_result("speed")
    assert saved is not None and set(saved["figures"]) == {"lora", "sft"}
    assert saved["figures"]["sft"]["measured"].keys() == {"date", "commit"}


@pytest.mark.parametrize("work", speed.KNOWN)
def test_an_unknown_variant_is_answered_with_the_known_ones(work: str) -> None:
    with pytest.raises(UsageError, match=r"there are: ours, .* \| |--variant is not for (start|survival|sft-small)"):
        speed.measure(work, ["ours", "olive"], steps=1)


def test_figures_of_a_workload_do_not_replace_those_of_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    path = common.save(common.result("speed", {"dpo": {"device": "NVIDIA H200", "variants": {}}}))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="the saved figures of dpo are of NVIDIA H200, and this is"):
        speed.main(work="dpo", save=True)
    with pytest.raises(UsageError, match="are of NVIDIA H200"):
        speed.merge_result({"work": "dpo", "device": "2 CPU threads", "variants": {}})
    assert path.read_bytes() == before


def test_processes_find_what_this_one_finds_wherever_they_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU machine that cannot install has its packages in a folder, named from where the command was given."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more/extra.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "more")
    environ = environment({})
    subprocess.run([sys.executable, "-c", "import extra, modelwright"], env=environ, cwd="/", check=True)
