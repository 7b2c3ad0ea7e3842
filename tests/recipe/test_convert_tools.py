"""Configurations in the shapes of the four tools: every key is carried or named, and none becomes another method."""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from modelwright.errors import ModelwrightError, UsageError
from modelwright.recipe.convert import METHODS, ConvertedRecipe, convert_config
from modelwright.recipe.sections import CountOrFraction
from modelwright.recipe.source import Origin, read_file

HOME = Path(__file__).parent / "converted"
LF = "model_name_or_path: m\ndo_train: true\n"
AXO = "base_model: m\nmicro_batch_size: 2\n"
AH = "model_name_or_path: m\n"
ALPACA = "datasets: [{path: a.jsonl, type: alpaca}]\n"

CONVERTED: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    # LLaMA-Factory
    "lf_lora": ("llamafactory", "sft", f"{LF}stage: sft\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
        "dataset: questions\ntemplate: llama3\ncutoff_len: 2048\nmax_samples: 1000\noverwrite_cache: true\n"
        "preprocessing_num_workers: 16\noutput_dir: saves/m/lora/sft\nlogging_steps: 10\nplot_loss: true\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
        "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\nddp_timeout: 180000000\n"
        "resume_from_checkpoint: null\nval_size: 0.1\nper_device_eval_batch_size: 1\neval_strategy: steps\n"
        "eval_steps: 500\n",
        {"data.train_file": "data/questions.json", "data.max_rows": 1000, "sft.lora_r": 8, "sft.lora_alpha": 16,
         "sft.max_length": 2048, "data.columns": {"instruction": "prompt", "input": "context", "output": "completion"},
         "sft.lora_target_modules": "all-linear", "sft.gradient_checkpointing": True}, "template"),
    "lf_full": ("llamafactory", "sft", f"{LF}stage: sft\nfinetuning_type: full\ndataset: renamed\n"
        "deepspeed: examples/deepspeed/ds_z3_config.json\ntrain_on_prompt: true\npure_bf16: true\n",
        {"sft.distributed_strategy": "fsdp", "sft.assistant_only_loss": False, "sft.param_dtype": "bf16",
         "data.columns": {"ask": "prompt", "passage": "context", "reply": "completion", "persona": "system"}},
        "deepspeed pure_bf16"),
    "lf_qlora": ("llamafactory", "sft", f"{LF}stage: sft\nfinetuning_type: lora\nquantization_bit: 4\n"
        "quantization_method: bnb\ndouble_quantization: true\nlora_target: q_proj,v_proj\nlora_alpha: 64\n"
        "dataset: talks\nneat_packing: true\npacking: true\nflash_attn: fa2\ndisable_gradient_checkpointing: true\n",
        {"sft.quantization": "nf4", "sft.lora_target_modules": ["q_proj", "v_proj"], "sft.lora_alpha": 64,
         "data.dataset_name": "someone/talks", "data.dataset_config_name": "long", "data.dataset_split": "train_sft",
         "data.max_rows": 500, "data.columns": {"turns": "messages"}, "sft.packing": True,
         "model.attn_implementation": "flash_attention_2", "sft.gradient_checkpointing": False}, "double_quantization"),
    "lf_8bit_awq": ("llamafactory", "sft", f"{LF}stage: sft\nquantization_bit: 8\nquantization_method: awq\n"
        "dataset: questions\n", {"sft.quantization": "none"}, "quantization_bit quantization_method"),
    "lf_freeze": ("llamafactory", "sft", f"{LF}stage: sft\nfinetuning_type: freeze\nfreeze_trainable_layers: 4\n"
        "dataset: questions\nuse_llama_pro: false\n", {"sft.trainable.last_layers": 4}, ""),
    "lf_freeze_first": ("llamafactory", "sft", f"{LF}stage: sft\nfinetuning_type: freeze\nfreeze_trainable_layers: -2\n"
        "dataset: questions\n", {}, "freeze_trainable_layers"),
    "lf_pt": ("llamafactory", "pretrain", f"{LF}stage: pt\nfinetuning_type: full\ndataset: books\nstreaming: true\n"
        "max_steps: 10000\npacking: true\n", {"data.text_column": "body", "pretrain.max_steps": 10000}, "packing"),
    "lf_dpo": ("llamafactory", "dpo", f"{LF}stage: dpo\nfinetuning_type: lora\npref_beta: 0.2\npref_loss: sigmoid\n"
        "pref_ftx: 1.0\ndataset: preferences\nref_model: null\ndpo_label_smoothing: 0.1\n",
        {"dpo.beta": 0.2, "dpo.loss_type": "sigmoid", "dpo.label_smoothing": 0.1,
         "data.columns": {"conversations": "prompt", "good": "chosen", "bad": "rejected"}}, "pref_ftx"),
    "lf_dpo_alpaca": ("llamafactory", "dpo", f"{LF}stage: dpo\npref_loss: hinge\ndataset: alpaca_pairs\n",
        {"dpo.loss_type": "hinge"}, ""),
    "lf_two_sets": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: questions,renamed\nmix_strategy: interleave_under\n"
        "interleave_probs: 0.7,0.3\neval_dataset: held\n", {"data.validation_file": "data/held.json",
        "data.source": "questions and renamed", "data.weights": {"questions": 0.7, "renamed": 0.3},
        "data.stopping_strategy": "first_exhausted"}, ""),
    "lf_equal_sets": ("llamafactory", "dpo", f"{LF}stage: dpo\ndataset: preferences,talks\n"
        "mix_strategy: interleave_over\n", {"data.weights": {"pairs": 1.0, "talks": 1.0},
        "data.stopping_strategy": "all_exhausted"}, "dataset_info.ranking"),
    "lf_wrong_weights": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: questions,renamed\n"
        "mix_strategy: interleave_over\ninterleave_probs: '1.0'\n", {"data.weights": {}},
        "mix_strategy interleave_probs"),
    "lf_concatenated": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: questions,renamed\nmix_strategy: concat\n"
        "interleave_probs: 0.7,0.3\n", {"data.weights": {}}, "mix_strategy interleave_probs"),
    "lf_online": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: someone/set\ndataset_dir: ONLINE\n",
        {"data.dataset_name": "someone/set"}, ""),
    "lf_odd": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: oddly\nmask_history: true\nuse_badam: true\n"
        "neftune_noise_alpha: 5\nflash_attn: fa3\n", {"data.train_file": "data/odd.json"},
        "dataset_info.tags.role_tag dataset_info.tags.content_tag mask_history use_badam neftune_noise_alpha flash_attn"),
    "lf_pictures": ("llamafactory", "sft", f"{LF}stage: sft\ndataset: pictures\nfreeze_vision_tower: true\n"
        "image_max_pixels: 262144\n", {}, "dataset_info.columns.images freeze_vision_tower image_max_pixels"),
    # the alignment-handbook
    "ah_sft": ("handbook", "sft", f"{AH}model_revision: main\ntorch_dtype: bfloat16\nuse_flash_attention_2: true\n"
        "chat_template: '{{ messages }}'\ndataset_mixer:\n  HuggingFaceH4/ultrachat_200k: 1.0\ndataset_splits: [train_sft, test_sft]\n"
        "preprocessing_num_workers: 12\nbf16: true\ndo_eval: true\nevaluation_strategy: epoch\n"
        "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}\n"
        "hub_model_id: zephyr-7b-sft-full\nlearning_rate: 2.0e-05\nmax_seq_length: 2048\nmax_steps: -1\n"
        "num_train_epochs: 1\noverwrite_output_dir: true\npush_to_hub: true\nremove_unused_columns: true\nseed: 42\n"
        "save_strategy: steps\nsave_steps: 100\nwarmup_ratio: 0.1\nreport_to: [tensorboard]\n",
        {"data.dataset_name": "HuggingFaceH4/ultrachat_200k", "data.dataset_split": "train_sft", "seed": 42,
         "model.attn_implementation": "flash_attention_2", "sft.max_length": 2048, "data.test_size": 0.1,
         "model.chat_template": "{{ messages }}"},
        "dataset_test_split torch_dtype push_to_hub"),
    "ah_dpo": ("handbook", "dpo", f"{AH}# DPOTrainer arguments\nbeta: 0.01\ndataset_mixer: {{HuggingFaceH4/uf: 0.5}}\n"
        "dataset_splits: [train_prefs, test_prefs]\nmax_length: 1024\nmax_prompt_length: 512\noptim: adamw_torch\n"
        "loss_type: sigmoid\noutput_dir: data/zephyr-7b-dpo-full\n",
        {"dpo.beta": 0.01, "data.dataset_split": "train_prefs"}, "datasets[0].fraction max_prompt_length"),
    "ah_two": ("handbook", "sft", f"{AH}dataset_mixer: {{a/one: 1.0, b/two: 0.3}}\ndataset_configs: [all, small]\n"
        "auto_insert_empty_system_msg: false\nrun_name: my-sft\n", {"data.source": "one and two"}, ""),
    "ah_mixture": ("handbook", "sft", f"{AH}dataset_mixture:\n  datasets:\n    - {{id: a/one, config: SFT, split: train, "
        "columns: [messages], weight: 1.0}\n    - {id: b/two, weight: 0.5}\n  seed: 0\n  test_split_size: 0.05\n"
        "packing: true\neos_token: <|im_end|>\nchat_template: x\nuse_liger_kernel: true\n",
        {"data.source": "one and two", "data.test_size": 0.05}, "dataset_mixture.seed datasets[0].columns eos_token"),
    "ah_cpt": ("handbook", "pretrain", f"{AH}# run_cpt.py\ndataset_mixer: {{a/text: 1.0}}\ndataset_text_field: content\n",
        {"data.text_column": "content"}, "dataset_text_field"),
    # axolotl
    "axo_fsdp": ("axolotl", "sft", f"{AXO}{ALPACA}fsdp: [full_shard, auto_wrap]\nfsdp_config: {{fsdp_offload_params: "
        "true}\nxformers_attention: true\n", {"sft.distributed_strategy": "fsdp"}, "fsdp fsdp_config xformers_attention"),
    "axo_hybrid": ("axolotl", "sft", f"{AXO}{ALPACA}fsdp_config: {{fsdp_sharding_strategy: HYBRID_SHARD}}\n",
        {"sft.distributed_strategy": "hsdp"}, "fsdp_config"),
    "axo_zero2": ("axolotl", "sft", f"{AXO}{ALPACA}deepspeed: {{zero_optimization: {{stage: 2}}}}\n",
        {"sft.distributed_strategy": "auto"}, "deepspeed"),
    "axo_ipo": ("axolotl", "dpo", f"{AXO}rl: ipo\nrl_beta: 0.3\ndatasets: [{{path: p.jsonl, type: chatml.intel}}]\n"
        "dpo_use_weighting: true\n", {"dpo.loss_type": "ipo", "dpo.beta": 0.3}, "datasets[0].type dpo_use_weighting"),
    "axo_chat": ("axolotl", "sft", f"{AXO}datasets:\n  - path: chats.jsonl\n    type: chat_template\n    roles_to_train: "
        "[assistant]\n    train_on_eos: turn\n  - path: more.jsonl\n    type: chat_template\nroles: {}\n"
        "flash_attention: true\ns2_attention: true\ncurriculum_sampling: true\n", {"sft.assistant_only_loss": True, "data.source": "chats and more"},
        "flash_attention s2_attention curriculum_sampling"),
    "axo_completion": ("axolotl", "pretrain", f"{AXO}datasets: [{{path: t.jsonl, type: completion, field: body}}]\n",
        {"data.text_column": "body"}, ""),
    "axo_unknown": ("axolotl", "sft", f"{AXO}{ALPACA}learning_rat: 1e-4\nscaling_softmax: true\n", {},
        "learning_rat scaling_softmax"),
    # TRL
    "trl_split": ("trl", "sft", "# trl sft\nmodel_name_or_path: m\ndataset_name: d\npacking: true\npacking_strategy: "
        "bfd_split\nattn_implementation: xformers\n", {"sft.packing_strategy": "bfd_split", "sft.packing": True},
        "attn_implementation"),
    "trl_accelerate": ("trl", "sft", "model_name_or_path: m\ndataset_name: d\npacking: false\n"
        "accelerate_config: zero3\n", {"sft.distributed_strategy": "fsdp"}, "accelerate_config"),
    "trl_dropout": ("trl", "dpo", "# trl dpo\nmodel_name_or_path: m\ndataset_name: d\ndisable_dropout: false\nbeta: 0.3\n",
        {"dpo.beta": 0.3, "dpo.disable_dropout": False}, ""),
    "trl_unsaid": ("trl", "sft", "model_name_or_path: m\ndataset_name: d\n", {}, "method"),
}  # fmt: skip
"""Tool, stage, configuration, settings of the recipe, and names that must be reported."""

REFUSED = {
    "axo_kto": (f"{AXO}{ALPACA}rl: kto\nkto_desirable_weight: 0.2\n", "this trains by kto (rl: kto)"),
    "axo_grpo": (f"{AXO}{ALPACA}rl: grpo\ntrl: {{beta: 0.001, use_vllm: true}}\n", "this trains by grpo"),
    "axo_simpo": (f"{AXO}rl: simpo\ndatasets: [{{path: p, type: chatml.ultra}}]\n", "this trains by simpo"),
    "axo_reward": (f"{AXO}{ALPACA}reward_model: true\n", "this trains by reward (reward_model)"),
    "axo_llama_adapter": (f"{AXO}{ALPACA}adapter: llama-adapter\n", "adapter: llama-adapter, which is not offered"),
    "lf_rm": (f"{LF}stage: rm\ndataset: preferences\n", "this trains by reward (stage: rm)"),
    "lf_kto": (f"{LF}stage: kto\ndataset: votes\npref_beta: 0.1\n", "this trains by kto (stage: kto)"),
    "lf_ppo": (f"{LF}stage: ppo\nreward_model: saves/rm\ndataset: questions\n", "this trains by ppo"),
    "lf_simpo": (f"{LF}stage: dpo\npref_loss: simpo\ndataset: preferences\n", "this trains by simpo (pref_loss: simpo)"),
    "lf_votes": (f"{LF}stage: sft\ndataset: votes\n", "this trains by kto (columns.kto_tag"),
    "lf_oft": (f"{LF}stage: sft\nfinetuning_type: oft\ndataset: questions\n", "finetuning_type: oft"),
    "lf_dft": (f"{LF}use_dft_loss: true\ndataset: questions\n", "this trains by dft"),
    "lf_chat": ("model_name_or_path: m\ntemplate: llama3\ninfer_backend: huggingface\n", "no training is in it"),
    "trl_exo": ("# trl dpo\nmodel_name_or_path: m\nloss_type: exo_pair\n", "this trains by exo_pair (loss_type"),
    "trl_kto": ("model_name_or_path: m\ndesirable_weight: 1.1\n", "this trains by kto (desirable_weight)"),
    "trl_named_kto": ("# trl kto --config kto.yaml\nmodel_name_or_path: m\nbeta: 0.1\n", "comments say kto"),
    "trl_grpo_output": ("model_name_or_path: m\ndataset_name: d\noutput_dir: Qwen2-0.5B-GRPO\n", "comments say grpo"),
    "trl_beta_only": ("model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n", "name it: --stage dpo"),
    "trl_gkd": ("model_name_or_path: m\nteacher_model_name_or_path: t\n", "this trains by gkd"),
    "accelerate": ("distributed_type: FSDP\nmixed_precision: bf16\n", "a configuration of accelerate"),
}  # fmt: skip


def convert_text(text: str, folder: Path, name: str = "some", **options: str) -> ConvertedRecipe:
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return convert_config(file, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the data sets of LLaMA-Factory."""
    (tmp_path / "data").symlink_to(HOME / "data")
    return tmp_path


@pytest.mark.parametrize("name", CONVERTED)
def test_a_configuration_of_a_tool_is_carried_or_named(name: str, folder: Path) -> None:
    tool, stage, text, expected, named = CONVERTED[name]
    converted = convert_text(text, folder)
    assert (converted.tool, converted.stage) == (tool, stage)
    recipe = converted.recipe
    assert recipe is not None, converted.problems
    assert list(recipe.stages) == [stage]
    for key, value in expected.items():
        node: Any = recipe
        for part in key.split("."):
            node = getattr(node, part)
        assert getattr(node, "raw", node) == value or (isinstance(value, float) and node.fraction == value), key
    reported = {each.key for each in converted.unconverted}
    assert {*named.split()} <= reported, reported
    for each in converted.unconverted:
        assert each.key in converted.text
    every = {re.split(r"[.\[]", key)[0] for key in (*converted.converted, *reported)}
    tree, _ = read_file(folder / "some.yaml", Origin("recipe", "some.yaml"))
    missing = {*tree.mapping} - every - {"dataset_mixer"}
    assert not missing


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_offered_is_refused_by_its_name(name: str, folder: Path) -> None:
    text, message = REFUSED[name]
    with pytest.raises(UsageError, match=re.escape(message)):
        convert_text(text, folder)


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
@pytest.mark.parametrize("text", [f"{AXO}{ALPACA}rl: kto\n", f"{AXO}{ALPACA}rl: dpo\n", f"{LF}stage: rm\n"])
def test_no_option_turns_one_method_into_another(text: str, stage: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"not offered|is another method"):
        convert_text(text, folder, stage=stage)


def test_orpo_is_refused_or_becomes_orpo_and_never_dpo(folder: Path) -> None:
    pairs = "datasets: [{path: p.jsonl, type: chat_template}]\n"
    texts = (f"{AXO}{pairs}rl: orpo\norpo_alpha: 0.2\n", f"{LF}stage: dpo\npref_loss: orpo\ndataset: preferences\n",
             f"{AH}# ORPOTrainer arguments\nbeta: 0.05\ndataset_mixer: {{a/b: 1.0}}\nmax_prompt_length: 1792\n")  # fmt: skip
    for text in texts:
        if "orpo" in METHODS:
            assert convert_text(text, folder).stage == "orpo"
        else:
            with pytest.raises(UsageError, match="orpo"):
                convert_text(text, folder)


def test_an_incomplete_recipe_is_written_with_what_is_missing_at_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.yaml").write_text("base_model: m\nlearning_rate: fast\nmicro_batch_size: 4\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(tmp_path / "some.yaml"), "-o", str(tmp_path / "new.yaml")])
    assert stop.value.code == 2
    text = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    assert re.search(r"\ndata:\n  # .*it wants a section data", text)
    assert re.search(r"\nsft:\n(  .*\n)*  # learning_rate: fast: .*it wants a number above 0", text)
    assert "per_device_train_batch_size: 4" in text
    assert "some.yaml:2: sft.learning_rate is 'fast'; it wants a number above 0" in capsys.readouterr().err


def test_the_file_of_accelerate_sets_strategy_and_precision(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    kinds = {"DEEPSPEED": "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}",
             "FSDP": "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", "MULTI_GPU": "num_machines: 1"}  # fmt: skip
    strategies = {"DEEPSPEED": "fsdp", "FSDP": "hsdp", "MULTI_GPU": "auto"}
    for kind, line in kinds.items():
        file.write_text(f"distributed_type: {kind}\nmixed_precision: bf16\nnum_processes: 8\n{line}\n", "utf-8")
        converted = convert_text("model_name_or_path: m\ndataset_name: d\n", tmp_path, accelerate=str(file))
        stage = converted.recipe.stages["sft"] if converted.recipe else None
        assert stage is not None
        assert (stage.distributed_strategy, stage.precision) == (strategies[kind], "bf16")
        assert "accelerate_config.num_processes" in {each.key for each in converted.unconverted}


def test_there_are_at_least_forty_configurations_of_the_four_tools() -> None:
    assert len(CONVERTED) + len(REFUSED) >= 40
    assert {tool for tool, *_ in CONVERTED.values()} == {"trl", "axolotl", "llamafactory", "handbook"}


def test_several_data_sets_become_a_mixture_with_their_own_settings(folder: Path) -> None:
    recipe = convert_text(CONVERTED["ah_two"][2], folder).recipe
    assert recipe is not None and recipe.data is not None
    one, two = recipe.data.mix.values()
    assert (one.dataset_name, one.dataset_config_name, one.max_rows) == ("a/one", "all", None)
    assert (two.dataset_name, two.dataset_config_name, two.max_rows) == ("b/two", "small", CountOrFraction(0.3))
    assert recipe.data.weights == {}, "every row once, as in the handbook"
    recipe = convert_text(CONVERTED["lf_two_sets"][2], folder).recipe
    assert recipe is not None and recipe.data is not None
    assert [source.columns != {} for source in recipe.data.mix.values()] == [True, True]


@pytest.mark.parametrize("value", ["5", "-1", "word", "[]", "[1]", "{}", "{a: {b: 1}}", "[{}]"])
def test_a_value_of_another_shape_is_no_traceback(value: str, folder: Path) -> None:
    keys = {
        AXO: "datasets evals_per_epoch num_epochs deepspeed fsdp_config test_datasets chat_template trl",
        f"{LF}dataset: questions\n": "dataset dataset_dir lora_rank lora_target quantization_bit deepspeed",
        f"{AH}dataset_splits: [train, test]\n": "dataset_mixer dataset_mixture dataset_configs datasets loss_type",
    }
    for base, names in keys.items():
        for name in names.split():
            with contextlib.suppress(ModelwrightError):
                converted = convert_text(f"{base.replace('dataset: questions', '')}{name}: {value}\n", folder)
                assert name in f"{converted.text} {converted.converted}" or value in ("[]", "{}", "[{}]")
