"""A model is exported in the requested format with its model card; a wrong format is refused before any work."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modelwright.errors import GateClosed, ModelError, UsageError
from modelwright.models import pretrained, save
from modelwright.models.gguf import pre_tokenizer, unsupported_reason
from modelwright.models.pretrained import load_model
from modelwright.models.vision import resnet18
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import pipeline
from modelwright.stages.export import CHECKSUMS_FILE, PTH_FILES, ExportResult, _model_key, check_export, export
from tiny import tiny_recipe

LINE = torch.tensor([[5, 9, 17, 33, 8]])


@pytest.fixture(scope="module")
def tuned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of the tiny model; exports go elsewhere."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("tuned"), model_folder, max_steps=3)
    return pipeline.run(load(recipe, ("save_pth=true",), {}))


@pytest.fixture(scope="module")
def adapted(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run that trained an adapter."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("adapted"), model_folder, max_steps=3, trainable="lora", lora_r=4)
    return pipeline.run(load(recipe, ("save_pth=true",), {}))


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of a narrow image classifier."""
    folder, draw = tmp_path_factory.mktemp("classified"), np.random.default_rng(0)
    for side, count in (("train", 8), ("test", 4)):
        for kind, bright in (("dark", 0), ("light", 150)):
            class_dir = folder / "images" / side / kind
            class_dir.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 90, (32, 32, 3)) + bright
                Image.fromarray(pixels.astype(np.uint8)).save(class_dir / f"{number}.png")
    sections = {
        "name": "pictures", "output_dir": str(folder / "run"), "save_pth": True,
        "model": {"model_name_or_path": "resnet18", "resnet_width": 4},
        "data": {"dataset_name": str(folder / "images")},
        "classify": {"max_steps": 4, "per_device_train_batch_size": 4, "precision": "fp32", "save_steps": 2},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(sections), encoding="utf-8")
    return pipeline.run(load(folder / "recipe.yaml", (), {}))


def exported(run: RunFolder, folder: Path, form: str, kind: str = "f16") -> ExportResult:
    done = export(check_export(str(run.path), form, kind, str(folder / form)))
    lines = (done.path / CHECKSUMS_FILE).read_text(encoding="utf-8").splitlines()
    assert {line.split("  ")[1] for line in lines} == {path.name for path in done.path.iterdir()} - {CHECKSUMS_FILE}
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((done.path / name).read_bytes()).hexdigest() == digest
    return done


def test_a_first_run_with_a_closed_gate_writes_the_last_weights_as_pth(classified: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(classified.path, tmp_path / "run", symlinks=True)
    for path in (tmp_path / "run").glob("*.pth"):
        path.unlink()
    gate = "gates={classify: {eval_loss: {at_most: 1e-9}}}"
    with pytest.raises(GateClosed):
        pipeline.run(load(tmp_path / "run/recipe.yaml", (gate, f"output_dir={tmp_path / 'run'}"), {}))
    names = {path.name for path in (tmp_path / "run").glob("*.pth")}
    assert names == {"final_model.pth", "checkpoint_latest.pth"}
    assert not (tmp_path / "run/pth").exists()


def test_a_run_on_images_never_speaks_of_tokens(classified: RunFolder) -> None:
    files = [path for path in classified.path.rglob("*") if path.suffix in (".json", ".jsonl", ".md", ".html")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if "checkpoints" not in path.parts}
    assert {"journal.jsonl", "training_summary.json", "training_history.json", "report.html", "README.md"} <= set(texts)
    assert [name for name, text in texts.items() if "token" in text.lower()] == []
    metrics = read_json(classified.summary)["metrics"]
    assert metrics["images"] == 16
    assert read_json(classified.plan)["classify"]["actual"]["images_per_second"]["actual"] > 0


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    output: torch.Tensor = model.eval()(input_ids=LINE, use_cache=False).logits
    return output


def test_a_folder_holds_the_very_model(tuned: RunFolder, tmp_path: Path) -> None:
    done = exported(tuned, tmp_path, "hf")
    assert torch.equal(logits(load_model(done.path)), logits(load_model(tuned.best_model)))


@pytest.mark.parametrize(
    ("dtype", "name"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_weights_are_exported_in_the_dtype_that_is_asked_for(
    tuned: RunFolder, tmp_path: Path, dtype: str, name: torch.dtype
) -> None:
    done = export(check_export(str(tuned.path), "hf", output=str(tmp_path / "out"), dtype=dtype))
    weights = load_file(done.path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {name}
    assert f"torch.{json.loads((done.path / 'config.json').read_text())['dtype']}" == str(name)
    with pytest.raises(UsageError, match="--dtype bf16 does not fit --format gguf; it wants one of bf16, fp16, fp32"):
        check_export(str(tuned.path), "gguf", dtype="bf16")


def test_a_merged_adapter_answers_as_base_and_adapter_do(adapted: RunFolder, tmp_path: Path) -> None:
    done = exported(adapted, tmp_path, "merged")
    assert not (done.path / "adapter_config.json").exists()
    assert torch.allclose(logits(load_model(done.path)), logits(load_model(adapted.best_model)), atol=1e-5)


def test_merging_an_adapter_on_tied_matrices_unties_them(model_folder: Path, tmp_path: Path) -> None:
    settings = {"trainable": "lora", "learning_rate": 1e-2, "lora_target_modules": ["lm_head", "embed_tokens"]}
    run = pipeline.run(load(tiny_recipe(tmp_path, model_folder, max_steps=3, **settings), (), {}))
    for form in ("merged", "gguf") if find_spec("gguf") else ("merged",):
        done = exported(run, tmp_path, form)
        if form == "merged":
            assert torch.allclose(logits(load_model(done.path)), logits(load_model(run.best_model)), atol=1e-5)
            assert not load_model(done.path).config.tie_word_embeddings


def test_an_export_with_other_logits_is_not_kept(
    adapted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "merge_lora", lambda model: model.unload())
    with pytest.raises(ModelError, match=r"export: the exported model's logits are .* off those of the trained one"):
        exported(adapted, tmp_path, "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-2), ("q8_0", 5e-2)])
def test_gguf_is_held_against_its_source(tuned: RunFolder, tmp_path: Path, kind: str, most: float) -> None:
    """In the same kind of numbers the two are one model; against the source as trained there is rounding."""
    pytest.importorskip("gguf", reason="the extra gguf")
    done = exported(tuned, tmp_path, "gguf", kind)
    assert done.logit_comparison is not None
    assert done.logit_comparison["max_diff_same_dtype"] < 1e-4 and 0 < done.logit_comparison["relative_diff"] < most
    assert f"off the source's in {kind}" in (done.path / "README.md").read_text(encoding="utf-8")
    assert [path.suffix for path in done.path.iterdir() if path.stem.startswith("tiny")] == [".gguf"]


def test_gguf_of_an_adapter_holds_base_and_adapter(adapted: RunFolder, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra gguf")
    done = exported(adapted, tmp_path, "gguf")
    assert done.logit_comparison is not None and done.logit_comparison["max_diff_same_dtype"] < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_become_gguf_too(family: str, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra gguf")
    from transformers import AutoConfig, AutoModelForCausalLM

    from modelwright.models.gguf import compare_logits, write_gguf

    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    if family == "qwen3":
        heads["head_dim"] = 128  # the reader knows no other for this family
    config = AutoConfig.for_model(family, **sizes, **heads, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert unsupported_reason(tmp_path / "model") is None
    write_gguf(tmp_path / "model", tmp_path / "x.gguf", "f16", family)
    assert compare_logits(tmp_path / "model", tmp_path / "x.gguf", "f16").max_diff_same_dtype < 1e-4


def test_a_gguf_that_is_not_its_source_is_not_kept(
    tuned: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the extra gguf")
    from modelwright.errors import ModelError
    from modelwright.models import gguf

    wrong = lambda name, weight, config: weight * (1.1 if "norm" in name else 1.0)  # noqa: E731
    monkeypatch.setattr(gguf, "_permute_rope", wrong)
    with pytest.raises(ModelError, match=r"logits are up to .* off its source's in f16, above 0.01; not kept"):
        exported(tuned, tmp_path, "gguf")
    assert list(tmp_path.iterdir()) == []


def test_pth_files_open_without_running_anything_in_them(classified: RunFolder, tmp_path: Path) -> None:
    done = exported(classified, tmp_path, "pth")
    tensors = {name: torch.load(done.path / f"{name}.pth", weights_only=True)
             for name in ("best_model", "final_model", "checkpoint_latest")}  # fmt: skip
    model = resnet18(2, 4)
    for weights in (tensors["best_model"], tensors["final_model"], tensors["checkpoint_latest"]["model_state_dict"]):
        model.load_state_dict(weights)
    assert tensors["checkpoint_latest"]["step"] == 4
    assert tensors["checkpoint_latest"]["class_names"] == ["dark", "light"]
    assert tensors["checkpoint_latest"]["optimizer_state"]


def test_a_run_leaves_pth_files_where_its_recipe_asks_for_them(classified: RunFolder) -> None:
    best, final, latest = (torch.load(classified.path / name, weights_only=True) for name in PTH_FILES)
    for weights in (best, final, latest["model_state_dict"]):
        resnet18(2, 4).load_state_dict(weights)
    assert latest["step"] == 4 and not (classified.path / "pth").exists()


@pytest.mark.parametrize("which", ["tuned", "adapted"])
def test_pth_files_of_a_language_model_hold_its_whole_state_dict(which: str, request: pytest.FixtureRequest) -> None:
    run: RunFolder = request.getfixturevalue(which)
    best, final, latest = (torch.load(run.path / name, weights_only=True) for name in PTH_FILES)
    trained = load_model(run.model("sft")).eval()
    plain = AutoModelForCausalLM.from_config(trained.config).eval()
    for weights in (best, final, latest["model_state_dict"]):
        plain.load_state_dict(weights)  # strict: tied weights under both names
    assert latest["step"] == 3 and latest["optimizer_state"]
    stored = load_file(run.checkpoints("sft") / "step-00000003" / "model.safetensors")
    mapped = {_model_key(key, set(trained.state_dict())): value for key, value in stored.items()}
    assert None not in mapped  # final_model.pth has every weight of the last step
    assert which == "adapted" or all(torch.equal(final[name], value) for name, value in mapped.items())
    plain.load_state_dict(best)
    assert torch.allclose(plain(LINE).logits, trained(LINE).logits, atol=1e-5)


def test_a_closed_gate_leaves_no_best_model_pth(classified: RunFolder) -> None:
    recipe = load(classified.recipe, ("gates.classify.seconds={at_most: 0}",), {})
    with pytest.raises(GateClosed):
        pipeline.run(recipe)
    assert not (classified.path / "best_model.pth").exists() and (classified.path / "final_model.pth").exists()
    warning = check_export(str(classified.path), "pth").warning
    assert warning is not None and warning.startswith("warning: gate classify is closed: seconds ")


def test_an_export_with_an_open_gate_warns_of_nothing(tuned: RunFolder) -> None:
    assert check_export(str(tuned.path), "hf").warning is None


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs gguf")
def test_the_conversion_of_the_embedded_model_draws_no_bar_into_the_log(
    tuned: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [gguf] = exported(tuned, tmp_path, "gguf").path.glob("*.gguf")
    capfd.readouterr()
    pretrained._convert_embedded(gguf, tmp_path / "ready")
    assert (tmp_path / "ready" / "config.json").exists()
    assert capfd.readouterr().err == ""


def test_the_model_card_says_what_was_measured_on_what(tuned: RunFolder, tmp_path: Path) -> None:
    text = (exported(tuned, tmp_path, "hf").path / "README.md").read_text(encoding="utf-8")
    fingerprint = json.loads(tuned.data_manifest("sft").read_text())["fingerprint"]
    for text_part in ("| eval_loss |", fingerprint, "rows.jsonl", "sft has no gate", "| sft.learning_rate | `0.001` |",
                 "What is 3 and 4, in tents?", "## License", "## Limitations", "36 rows trained on"):  # fmt: skip
        assert text_part in text, text_part
    base = load(tuned.recipe, (), {}).recipe.model.model_name_or_path or ""
    assert f'\nbase_model: "{Path(base).name}"\n' in text.split("\n---\n")[0] + "\n", "also of a local folder"
    assert (tuned.model("sft") / "README.md").exists()


WRONG = [
    ("tuned", "merged", "trained no adapter, so there is nothing to merge; --format hf is the whole model"),
    ("tuned", "onnx", "--format onnx is unknown; it wants one of hf, merged, gguf, pth"),
    ("classified", "gguf", "trained an image classifier, which gguf does not hold; it wants pth"),
]


@pytest.mark.parametrize(("which", "form", "message"), WRONG, ids=[f"{which} {form}" for which, form, _ in WRONG])
def test_a_wrong_format_is_reported(which: str, form: str, message: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(UsageError, match=message):
        check_export(str(request.getfixturevalue(which).path), form)


def test_a_wrong_format_is_reported_before_torch_is_loaded(tuned: RunFolder) -> None:
    program = "import sys\nfrom modelwright.stages.export import check_export\n"
    program += f"try: check_export({str(tuned.path)!r}, 'merged')\nexcept Exception as e: print(e)\n"
    program += "print('torch' in sys.modules)"
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert "trained no adapter" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_a_folder_that_is_not_ours_is_not_overwritten(tuned: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is there already and is no export of ours"):
        check_export(str(tuned.path), "hf", output=str(tmp_path))
    exported(tuned, tmp_path, "hf")
    exported(tuned, tmp_path, "hf")  # our own export is replaced


def test_gguf_has_a_name_for_few_pre_tokenizers() -> None:
    byte_level = {"type": "ByteLevel", "use_regex": True}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    known = [pre_tokenizer({"model": {"type": "BPE"}, "pre_tokenizer": each}) for each in (byte_level, digits)]
    assert known == ["gpt-2", "smollm"]
    assert pre_tokenizer({"model": {"type": "Unigram"}, "pre_tokenizer": byte_level}) is None
    assert pre_tokenizer({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Metaspace"}}) is None
