"""Which parameters are trainable: all, named parts or LoRA; counts, and untied LM heads."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelwright.errors import ModelError, UsageError
from modelwright.models.attention import compute_logits, hidden_states
from modelwright.models.pretrained import load_model
from modelwright.models.save import merge_adapter, save_model
from modelwright.models.trainable import count_parameters, decoder_layers, describe_lora, set_trainable
from modelwright.recipe.stage_specs import TrainableConfig

TOKENS = torch.arange(20).unsqueeze(0)
POSITIONS = torch.arange(20).unsqueeze(0)


def moving(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def trained(folder: Path, **parts: Any) -> Any:
    return set_trainable(load_model(folder), TrainableConfig(trainable=parts))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return compute_logits(model.eval(), hidden_states(model, TOKENS, POSITIONS))


def train_a_little(model: Any) -> None:
    """Two steps of plain descent, so that what moves has moved."""
    for _ in range(2):
        loss = compute_logits(model.train(), hidden_states(model, TOKENS, POSITIONS)).logsumexp(-1).square().mean()
        loss.backward()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.data -= 0.5 * weight.grad
                weight.grad = None


def test_by_default_everything_moves(model_folder: Path) -> None:
    model = set_trainable(load_model(model_folder), TrainableConfig())
    count = count_parameters(model)
    assert count.trained == count.total == sum(weight.numel() for weight in model.parameters())


def test_the_last_layer_moves_and_nothing_else(model_folder: Path) -> None:
    model = trained(model_folder, last_layers=1)
    assert moving(model)
    assert all(name.startswith("model.layers.1.") for name in moving(model))


def test_the_head_of_an_untied_model_moves_alone(untied_model_folder: Path) -> None:
    assert moving(trained(untied_model_folder, lm_head=True)) == {"lm_head.weight"}


def test_a_tied_head_moves_with_its_embeddings(model_folder: Path) -> None:
    assert moving(trained(model_folder, lm_head=True)) == {"model.embed_tokens.weight"}


def test_untying_leaves_the_embeddings_where_they_are(model_folder: Path) -> None:
    model = trained(model_folder, lm_head=True, untie_lm_head=True)
    assert moving(model) == {"lm_head.weight"}
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    train_a_little(model)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_untying_alone_lets_everything_move_and_counts_the_copy(model_folder: Path) -> None:
    tied, untied = (
        count_parameters(load_model(model_folder)),
        count_parameters(trained(model_folder, untie_lm_head=True)),
    )
    assert untied.total == tied.total + 400 * 64
    assert untied.trained == untied.total


def test_untying_a_head_of_its_own_changes_nothing(untied_model_folder: Path) -> None:
    plain = count_parameters(load_model(untied_model_folder))
    assert count_parameters(trained(untied_model_folder, untie_lm_head=True)).total == plain.total


def test_every_norm_moves(model_folder: Path) -> None:
    assert moving(trained(model_folder, norms=True)) == {
        "model.norm.weight",
        *(f"model.layers.{n}.{part}_layernorm.weight" for n in (0, 1) for part in ("input", "post_attention")),
    }


def test_more_layers_than_there_are_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"trainable.last_layers is 3, but the model has 2 layers"):
        trained(model_folder, last_layers=3)


def test_a_model_without_layers_we_know_is_an_error() -> None:
    with pytest.raises(ModelError, match="its transformer layers were not found"):
        decoder_layers(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["gpt_neox", "gemma3_text", "gpt2"])
def test_the_layers_of_other_families_are_found(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name))
    assert len(decoder_layers(model)) == model.config.num_hidden_layers


def test_two_layers_and_the_head_of_smollm3_are_13_62_percent() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # the real 3 B model, without its 12 GB
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("smollm3"))
    count = count_parameters(set_trainable(model, TrainableConfig(trainable={"last_layers": 2, "lm_head": True})))
    assert str(count) == "418.9 M of 3,075.1 M parameters trainable (13.62%)"


def test_lora_moves_its_own_matrices_alone(model_folder: Path) -> None:
    model = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_r=4))
    assert all("lora_" in name for name in moving(model))
    # rank 4 on q, k, v, o, gate, up and down of each layer: 4 × (in + out)
    per_layer = 4 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    assert count_parameters(model).trained == 2 * per_layer


def test_lora_starts_as_the_model_it_sits_on(model_folder: Path) -> None:
    with_adapters = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora"))
    assert torch.equal(logits(with_adapters), logits(load_model(model_folder)))


def test_lora_with_named_layers(model_folder: Path) -> None:
    model = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_target_modules=["q_proj"]))
    assert all(".q_proj.lora_" in name for name in moving(model))


def test_lora_with_missing_layers_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="LoRA could not be added"):
        set_trainable(
            load_model(model_folder), TrainableConfig(trainable="lora", lora_target_modules=["no_such_layer"])
        )


@pytest.mark.parametrize("parts", [{"untie_lm_head": True, "lm_head": True}, {"last_layers": 1}, {"lora": True}, {}])
def test_a_trained_model_is_saved_and_loaded_equal(
    parts: dict[str, Any], model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = trained(model_folder, **parts)
    train_a_little(model)
    assert not torch.equal(logits(model), logits(load_model(model_folder)))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    save_model(model, tokenizer, weights, tmp_path / "model")
    torch.testing.assert_close(logits(load_model(tmp_path / "model")), logits(model), atol=0, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(model), atol=1e-6, rtol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == tokenizer.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"], "nothing half-written is left next to it"


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True, "lora_r": 8}, {"use_dora": True}], ids=str)
def test_a_merged_adapter_answers_as_the_applied_one(
    kind: dict[str, Any], model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_alpha=64, **kind))
    train_a_little(model)
    save_model(model, tokenizer, dict(model.state_dict()), tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert (logits(model) - logits(load_model(model_folder))).abs().max() > 0.01
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(model), atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def scale_of(model: nn.Module) -> float:
    """What low-rank matrices are multiplied by."""
    scales = [module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    return float(scales[0]["default"])


def test_dora_and_rank_stabilised_matrices_are_what_they_are_called(model_folder: Path) -> None:
    plain = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_r=4))
    sized = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_r=4, use_dora=True))
    stable = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_r=4, use_rslora=True))
    assert any("lora_magnitude_vector" in name for name in moving(sized))
    assert (scale_of(plain), scale_of(stable)) == (32 / 4, 32 / 2)


def test_merging_what_is_no_adapter_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no adapter folder"):
        merge_adapter(model_folder, tmp_path / "merged")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_quantization_without_its_package_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="nf4 wants bitsandbytes, which is not installed: pip install bitsandbytes"):
        load_model(model_folder, quantization="nf4")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the extra quantization is not installed")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_learn_on_quantized_weights(kind: str, model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = set_trainable(
        load_model(model_folder, quantization=kind), TrainableConfig(trainable="lora", quantization=kind)
    )
    assert (
        count_parameters(model).total
        == count_parameters(set_trainable(load_model(model_folder), TrainableConfig(trainable="lora"))).total
    )
    apart = (logits(model) - logits(load_model(model_folder))).abs().max()
    assert 0 < apart < 0.2, "close to the exact weights, and not the same"
    before = logits(model)
    train_a_little(model)
    assert (logits(model) - before).abs().max() > 0.01
    save_model(model, tokenizer, dict(model.state_dict()), tmp_path / "adapter")
    assert all("lora_" in name for name in moving(model))
    assert (logits(load_model(tmp_path / "adapter")) - logits(model)).abs().max() < 0.3, "compared with exact weights"


def test_adapters_that_a_model_never_calls_are_refused() -> None:
    """Jamba reads the weight of dt_proj itself: its adapter would train nothing, and change the merged model."""
    from transformers import AutoModelForCausalLM, JambaConfig

    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_experts": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_period": 2,
             "attn_layer_offset": 1}  # fmt: skip
    for targets, refused in (("all-linear", True), (["in_proj", "q_proj"], False)):
        model = AutoModelForCausalLM.from_config(JambaConfig(**sizes))
        with pytest.raises(ModelError, match="LoRA of dt_proj would change nothing") if refused else nullcontext():
            set_trainable(model, TrainableConfig(trainable="lora", lora_target_modules=targets))


MOE = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2,
       "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}  # fmt: skip


def moe_folder(kind: str, folder: Path) -> Path:
    """The config of a mixture of experts, without weights."""
    from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    configs: dict[str, Any] = {
        "qwen3": lambda: Qwen3MoeConfig(**MOE, num_experts=4),
        "gpt-oss": lambda: GptOssConfig(**MOE, num_local_experts=4, head_dim=8),
        "deepseek": lambda: DeepseekV3Config(
            **{**MOE, "num_key_value_heads": 2}, **latent, n_routed_experts=4, n_group=2, topk_group=1,
            first_k_dense_replace=1,
        ),
    }  # fmt: skip
    configs[kind]().save_pretrained(folder)
    return folder


ATTENTION = "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj"
EXPERTS = "mlp.experts.gate_up_proj, mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "targets", "expected"),
    [
        ("qwen3", "all-linear", [f"LoRA adapts 14 weights: {ATTENTION}, {EXPERTS}, mlp.gate.weight"]),
        ("qwen3", ["q_proj", "gate_up_proj"], ["LoRA adapts 4 weights: self_attn.q_proj, mlp.experts.gate_up_proj"]),
        ("qwen3", ["q_proj", "gates"], "lora_target_modules names gates, which no layer is called"),
        ("gpt-oss", "all-linear", [f"LoRA adapts 8 weights: {ATTENTION}", f"LoRA leaves out {EXPERTS}"]),
        ("gpt-oss", ["o_proj", "down_proj"], ["LoRA adapts 4 weights: self_attn.o_proj, mlp.experts.down_proj"]),
        ("deepseek", ["down_proj"], "names down_proj, but peft does not adapt model.layers.0.mlp.down_proj"),
    ],
)  # fmt: skip
def test_experts_that_are_named_are_adapted_and_what_is_not_is_said(
    kind: str, targets: Any, expected: Any, tmp_path: Path
) -> None:
    parts = TrainableConfig(trainable="lora", lora_target_modules=targets)
    with pytest.raises(ModelError, match=expected) if isinstance(expected, str) else nullcontext():
        assert describe_lora(moe_folder(kind, tmp_path), parts) == expected


def test_experts_named_as_targets_are_trained_and_loaded_again(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(moe_folder("qwen3", tmp_path / "config")))
    base.save_pretrained(tmp_path / "base")
    parts = TrainableConfig(trainable="lora", lora_r=2, lora_target_modules=["q_proj", "gate_up_proj"])
    model = set_trainable(load_model(tmp_path / "base"), parts)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    changed = [name for name in moving(model) if "experts" in name]
    assert len(changed) == 4, "two matrices in each of two layers"
    tokens = torch.arange(9)[None]
    expected = model(tokens).logits
    assert (expected - base(tokens).logits).abs().max() > 1e-3
    save_model(model, tokenizer, dict(model.state_dict()), tmp_path / "adapter")
    assert torch.equal(load_model(tmp_path / "adapter").eval()(tokens).logits, expected)
