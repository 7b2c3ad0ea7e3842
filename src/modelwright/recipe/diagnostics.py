"""Check a tree against the schema and report every problem at once, with what an unknown key was meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from modelwright.recipe.fields import (
    ConfigField,
    all_sections,
    apply_aliases,
    canonical_key,
    example_value,
    get_field,
    join_key,
    known_names,
)
from modelwright.recipe.schema import Recipe
from modelwright.recipe.source import ConfigNode, KeyPath, RecipeProblem, drop_nulls, make_node, make_problem
from modelwright.recipe.stage_specs import STAGES

ConversionLoss = Literal["unsupported", "approximated", "not_needed"]
"""unsupported: there is no such setting; approximated: a similar one is written; not_needed: no setting is needed."""
MAX_PASSES = 12
"""Maximum number of validations, each after patching the problems of the one before."""


def validate_tree(tree: ConfigNode) -> tuple[Recipe | None, list[RecipeProblem]]:
    """Turn a tree into a recipe, or into the list of all its problems; null stands for the default.

    Checks between two settings run only if each is valid by itself. So each problem is patched with a valid value
    and the validation is repeated, to find the problems behind it.
    """
    nulls = {path: node for path, node in tree.walk() if node.value is None and not node.is_empty}
    tree, problems = _fill_blanks(drop_nulls(tree))
    keys = {each_problem.key for each_problem in problems}
    for _ in range(MAX_PASSES):
        try:
            recipe = Recipe.model_validate(to_python(tree))
        except ValidationError as error:
            patched = tree
            handled: set[KeyPath] = set()
            # unknown keys first: the keys they were meant to be are then not missing
            errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
            for details in (each for each in errors if each["type"] != "default_factory_not_called"):
                patched, new_problems = _diagnose(details, tree, patched, handled)
                problems += [each_problem for each_problem in new_problems if not _is_consequence(each_problem, keys)]
            keys |= {each_problem.key for each_problem in problems}
            problems = [_relocate_to_null(each_problem, nulls) for each_problem in problems]
            if patched is tree:
                break
            tree = apply_aliases(patched)[0]
        else:
            return (recipe if not problems else None), problems
    return None, problems


def to_python(node: ConfigNode, path: KeyPath = ()) -> Any:
    """Plain values for pydantic; booleans are not accepted as numbers, although Python does."""
    if isinstance(node.value, dict):
        return {key: to_python(child, (*path, key)) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_python(item, (*path, str(number))) for number, item in enumerate(node.value)]
    if isinstance(node.value, bool):
        setting = get_field(path)
        return node.text if setting is not None and setting.is_number else node.value
    return node.value


def _fill_blanks(tree: ConfigNode) -> tuple[ConfigNode, list[RecipeProblem]]:
    """Report keys without a value."""
    problems = []
    for path, node in list(tree.walk()):
        setting = get_field(path)
        if not node.is_empty or setting is None:
            continue
        wants = "a mapping, or {} for the defaults" if setting.section else setting.expected
        wants = setting.short_description if wants == "text" else wants
        or_null = ", or null for none" if setting.optional and not setting.section else ""
        key = ".".join(path)
        problems.append(make_problem(node.origin, key, f"{key} is empty; it wants {wants}{or_null}"))
        tree = tree.with_value(path, make_node(example_value(setting), node.origin))
    return tree, problems


def _diagnose(
    details: ErrorDetails, tree: ConfigNode, patched: ConfigNode, handled: set[KeyPath]
) -> tuple[ConfigNode, list[RecipeProblem]]:
    """Convert an error of pydantic to problems, and patch the tree for the next validation."""
    path = tuple(str(step) for step in details["loc"])
    kind = details["type"]
    if kind == "missing":
        return _diagnose_missing(path, tree, patched)
    if any(path[:length] in handled for length in range(len(path) + 1)):
        return patched, []
    if kind == "extra_forbidden":
        return _diagnose_unknown(path, tree, patched)
    if path[-1:] == ("[key]",):
        handled.add(path[:-1])
        return _diagnose_key(path[:-1], tree, patched)
    while path and tree.get(path) is None:
        path = path[:-1]  # the branch of a union, such as list[str], is not a key of the file
    node, setting = tree.get(path), get_field(path)
    assert node is not None and setting is not None
    if path in handled:
        return patched, []
    handled.add(path)
    diagnosis = make_problem(node.origin, ".".join(path), _message(details, path, node, setting))
    return (patched.with_value(path, make_node(example_value(setting), node.origin)) if path else patched), [diagnosis]


def _is_consequence(candidate: RecipeProblem, keys: set[str]) -> bool:
    """Whether a problem of a section names a setting that was patched, and so may be wrong."""
    below = (key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == candidate.key)
    return any(re.search(rf"\b{re.escape(name)}\b", candidate.message) for name in below)


def _diagnose_missing(path: KeyPath, tree: ConfigNode, patched: ConfigNode) -> tuple[ConfigNode, list[RecipeProblem]]:
    setting, parent = get_field(path), tree.get(path[:-1])
    assert setting is not None and parent is not None
    if patched.get(path) is not None:  # it is present under an unknown name
        return patched, []
    if setting.section:  # the next validation reports its missing settings
        return patched.with_value(path, ConfigNode({}, parent.origin)), []
    message = f"{setting.key} is missing; it wants {setting.short_description}"
    patched = patched.with_value(path, make_node(example_value(setting), parent.origin))
    return patched, [make_problem(parent.origin, setting.key, message)]


def _relocate_to_null(original: RecipeProblem, nulls: Mapping[KeyPath, ConfigNode]) -> RecipeProblem:
    """A required setting that was set to null is reported on that line."""
    steps = tuple(original.key.split("."))
    node = next((nulls[steps[:length]] for length in range(1, len(steps) + 1) if steps[:length] in nulls), None)
    if node is None or "is missing" not in original.message:
        return original
    return make_problem(node.origin, original.key, original.message)


def _diagnose_key(path: KeyPath, tree: ConfigNode, patched: ConfigNode) -> tuple[ConfigNode, list[RecipeProblem]]:
    """An invalid key of a mapping with fixed keys, such as a gate of a stage that does not exist."""
    node, holder = tree.get(path), get_field(path[:-1])
    assert node is not None and holder is not None
    names, key = get_args(holder.annotation)[0], ".".join(path)
    if get_origin(names) is not Literal:
        wanted = "a whole number" if get_args(names)[0] is int else "lower-case letters, digits and underscores"
        problem = make_problem(node.origin, key, f"{key} is unknown; it wants {wanted} before a colon and a space")
        return patched.without(path), [problem]
    allowed = [str(each) for each in get_args(names)]
    close = closest_match(path[-1], allowed, cutoff=0.5)
    hint = f"did you mean {close}?"
    if close is None and node.mapping and not any(child.mapping for child in node.mapping.values()):
        stage = next((name for name in allowed if tree.get((name,))), allowed[0])
        hint = f"it wants the stage first: {holder.key}.{stage}.{path[-1]}"
    elif close is None:
        hint = f"it wants {'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}"
    return patched.without(path), [make_problem(node.origin, key, f"{key} is unknown; {hint}")]


def _diagnose_unknown(path: KeyPath, tree: ConfigNode, patched: ConfigNode) -> tuple[ConfigNode, list[RecipeProblem]]:
    """An unknown key; its value is validated under the key it was probably meant to be."""
    node = tree.get(path)
    assert node is not None
    hint = explain_unknown_key(path, is_mapping=isinstance(node.value, dict))
    patched = patched.without(path)
    diagnosis = make_problem(node.origin, ".".join(path), hint.message)
    setting = get_field(tuple(canonical_key(".".join(hint.target)).split("."))) if hint.target else None
    if hint.target is None or setting is None or patched.get(hint.target) is not None:
        return patched, [diagnosis]
    parent = patched.get(hint.target[:-1])
    if isinstance(node.value, dict | list) and not setting.section:
        node = make_node(example_value(setting), node.origin)
    if parent is None or isinstance(parent.value, dict):
        patched = patched.with_value(hint.target, node)
    return patched, [diagnosis]


def _message(details: ErrorDetails, path: KeyPath, node: ConfigNode, setting: ConfigField) -> str:
    """What was found and what is expected."""
    name = ".".join((*path[:-1], node.alias_used or path[-1])) if path else "the recipe"
    if _is_item(path):
        name = f"item {int(path[-1]) + 1} of {'.'.join(path[:-1])}"
    text, kind = details["msg"], details["type"]
    context: Mapping[str, Any] = details.get("ctx") or {}
    if kind == "string_too_long":
        return f"{name} has {len(str(node.value))} characters; it wants at most {context['max_length']}"
    if text.startswith("it wants"):
        return f"{name} is {node.display}; {text}"
    if setting.section and kind not in ("model_type", "model_attributes_type"):
        return f"{name} {text}"
    if setting.choices and path[-1] in setting.choices and path[:-1] == ("data", "columns"):
        return f"{name} is {node.display}: key and value are swapped; write {node.value}: {path[-1]}"
    return f"{name} is {node.display}; it wants {setting.expected}{_suggestion(path, node, setting)}"


def _suggestion(path: KeyPath, node: ConfigNode, setting: ConfigField) -> str:
    """The end of the message, if the intended value can be guessed."""
    value = node.value
    if setting.is_str and value is not None and not isinstance(value, str | list | dict):
        return f"; put it in quotes: '{node.text}'"
    if isinstance(value, str):
        if setting.choices and (close := closest_match(value, setting.choices, cutoff=0.6)):
            return f"; did you mean {close!r}?"
        if setting.key == "name" and (slug := slugify(value)):
            return f"; did you mean {slug!r}?"
        if setting.section and re.match(r"\w+:\S", value):
            return "; put a space after the colon"
        if setting.section and (first := next(iter(example_value(setting)), None)):
            return f", such as {first}: {value}" if "\n" not in value else ""
        if get_origin(setting.annotation) is list:
            return ", each after a dash"
    if setting.section and isinstance(value, list):
        return ", without dashes"
    return ""


def _is_item(path: KeyPath) -> bool:
    holder = get_field(path[:-1]) if path else None
    return holder is not None and get_origin(holder.annotation) is list


def slugify(text: str) -> str:
    """The text as a valid recipe name; may be empty."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")


MAX_LISTED_KEYS = 10
"""The keys of larger sections are not listed in a message."""
UNSUPPORTED_STAGES = ("init", "grpo", "kto", "export")
ALIASES_BY_SECTION = {
    **{stage: spec.section_aliases for stage, spec in STAGES.items()},
    "data": "dataset datasets",
    "gates": "promotion_gates thresholds",
    "env_overrides": "env environment_variables",
    "base": "extends inherit defaults",
    "compare": "before_after demo samples",
}
SECTION_ALIASES = {other: ours for ours, others in ALIASES_BY_SECTION.items() for other in others.split()}
"""Names of our sections in other tools."""
SYNONYMS = {**dict.fromkeys(("max", "maximum"), "at_most"), **dict.fromkeys(("min", "minimum"), "at_least")}
_HINTS = {
    "set report_to: wandb, and WANDB_PROJECT in the environment": "wandb_project",
    "a run resumes by itself; leave it out": "resume auto_resume",
    "eval_steps decides alone; leave it out": "eval_strategy evaluation_strategy do_eval",
    "save_steps decides alone; leave it out": "save_strategy",
    "logging_steps decides alone; leave it out": "logging_strategy",
    "the metric determines the direction; leave it out": "greater_is_better",
    "a section sft is trained; leave it out": "do_train",
    "set distributed_strategy: ddp or fsdp": "fsdp fsdp_config deepspeed distributed",
    "set quantization: nf4 (4 bits) or int8, with trainable: lora": "load_in_4bit load_in_8bit quantization_bit",
    "data.columns maps columns, as {question: prompt}": "dataset_text_field formatting",
    "the tokenizer's chat template is used; model.chat_template sets another": "template chat_template_jinja",
    "it was removed in 0.2; leave it out": "tune_products",
    "the run is named by name, at the top level": "run_name",
    "it wants per_device_train_batch_size (rows per device) or global_batch_size (rows per step)": (
        "batch_size train_batch_size"
    ),
}
FOREIGN_KEY_HINTS = {name: hint for hint, names in _HINTS.items() for name in names.split()}
"""What check says of an unknown key of another tool where it is more than FOREIGN_KEYS says."""


@dataclass(frozen=True)
class UnknownKeyHint:
    """The explanation of an unknown key."""

    message: str
    """The message, without its location."""
    target: KeyPath | None = None
    """The key it was probably meant to be, under which its value is validated."""


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The most similar candidate, if any; the cutoff is lower for short names, where one typo weighs more."""
    cutoff = min(cutoff, 0.6) if len(name) <= 4 else cutoff
    lowered = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[matches[0]] if matches else None


def explain_unknown_key(path: KeyPath, is_mapping: bool = False) -> UnknownKeyHint:
    """Explain an unknown key: by a key of another tool, a similar name in its section, then in the other sections."""
    *parents, name = path
    section, key = ".".join(parents), ".".join(path)
    if not parents and is_mapping and name in SECTION_ALIASES:
        ours = SECTION_ALIASES[name]
        return UnknownKeyHint(f"{key} is unknown; the section is called {ours}", (ours,))
    if not parents and name in UNSUPPORTED_STAGES:
        return UnknownKeyHint(f"{key} is unknown; the stages are {', '.join(STAGES)} so far")
    if hint := _foreign_key_hint(name):
        return UnknownKeyHint(f"{key} is unknown; {hint}")
    if not parents and (exact := _find_in_other_section(name, section, fuzzy=False)):
        return exact
    known, synonym = known_names(section), SYNONYMS.get(name)
    close = synonym if synonym in known else closest_match(name, [*known, *(["base"] if not parents else [])])
    if close is not None:
        return UnknownKeyHint(f"{key} is unknown; did you mean {known.get(close, close)}?", (*parents, close))
    if other_section_hint := _find_in_other_section(name, section):
        return other_section_hint
    keys = list(dict.fromkeys(known.values()))
    if len(keys) <= MAX_LISTED_KEYS:
        return UnknownKeyHint(f"{key} is unknown; it wants one of {', '.join(keys)}")
    return UnknownKeyHint(f"{key} is unknown; modelwright explain quickstart {section} lists what is known")


def _foreign_key_hint(name: str) -> str:
    """What to do instead of a key of another tool; empty for other keys, and for those of our own sections."""
    is_ours = any(name in known_names(section) for section in all_sections())
    if name in FOREIGN_KEY_HINTS or name not in FOREIGN_KEYS or is_ours:
        return FOREIGN_KEY_HINTS.get(name, "")
    loss, advice = FOREIGN_KEYS[name]
    return f"{advice}; leave it out" if loss == "not_needed" else advice


def _find_in_other_section(name: str, section: str, fuzzy: bool = True) -> UnknownKeyHint | None:
    """The same name, or a similar one, in another section."""
    others = [other for other in all_sections() if other != section and not other.endswith(".data")]
    key = join_key(section, name)
    matches = [(other, known_names(other)[name]) for other in others if name in known_names(other)]
    if matches:
        first, ours = next((match for match in matches if match[0].startswith(f"{section}.")), matches[0])
        stages = {other for other, _ in matches} & set(STAGES)
        under = f"under {first}:" if first else "at the top level:"
        under = "to a stage, such as" if first in stages and len(stages) > 1 else under
        message = f"{key} belongs {under} {join_key(first, ours)}"
        return UnknownKeyHint(message, tuple(join_key(first, name).split(".")))
    for other in others if fuzzy and len(name) > 4 else ():
        close = closest_match(name, known_names(other), cutoff=0.85)
        if close is not None:
            ours = join_key(other, known_names(other)[close])
            return UnknownKeyHint(f"{key} is unknown; did you mean {ours}?", tuple(join_key(other, close).split(".")))
    return None


_FOREIGN_KEYS: Mapping[ConversionLoss, Mapping[str, str]] = {
    "unsupported": {
        "the weights of data.mix and data.stopping_strategy mix sources": "mix_strategy interleave_probs",
        "images, video and audio are not trained with text": (
            "media_dir image_max_pixels image_min_pixels video_max_pixels freeze_vision_tower train_mm_proj_only "
            "freeze_multi_modal_projector freeze_language_model"
        ),
        "the chat template of the tokenizer decides": (
            "tool_format enable_thinking auto_insert_empty_system_msg reasoning_effort"
        ),
        "NEFTune noise is not supported": "neftune_noise_alpha noisy_embedding_alpha",
        "label smoothing is not supported for text": "label_smoothing_factor",
        "all trainable parameters share one learning rate and one optimizer": (
            "optim_args optim_target_modules lr_groups embedding_lr embedding_lr_scale loraplus_lr_ratio "
            "loraplus_lr_embedding adam_beta3 adam_epsilon2 lr_quadratic_warmup lr_div_factor "
            "optimizer_cls_and_kwargs use_galore galore_target galore_rank use_apollo use_badam badam_mode "
            "badam_switch_interval use_adam_mini use_muon"
        ),
        "the batch size is not searched by trial; modelwright plan says what fits": "auto_find_batch_size",
        "nothing is uploaded; modelwright export writes a folder for hf upload": (
            "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision hub_token "
            "push_dataset_to_hub hf_use_auth_token save_first_step hf_hub_token ms_hub_token"
        ),
        "remote code of the hub is never run": "trust_remote_code",
        "answers are compared after training: compare": "generate_during_eval",
        "evaluations begin after the first eval_steps": "eval_delay",
        "the tokenizer is used unchanged": (
            "special_tokens tokens added_tokens_overrides eos_token pad_token eot_tokens "
            "resize_token_embeddings_to_32x shrink_embeddings tokenizer_config tokenizer_use_fast tokenizer_legacy "
            "tokenizer_use_mistral_common added_tokens chat_template_path fix_untrained_tokens "
            "mean_resizing_embeddings resize_vocab add_tokens add_special_tokens new_special_tokens_config "
            "split_special_tokens truncation_side tokenizer_name_or_path"
        ),
        "quantization is nf4 or int8 by bitsandbytes": (
            "use_bnb_nested_quant bnb_4bit_quant_storage bnb_config_kwargs gptq peft qat quantization loftq_config "
            "model_quantization_config model_quantization_config_kwargs double_quantization quantization_device_map"
        ),
        "LoRA adapts whole linear layers; no other modules are saved with the adapter": (
            "lora_modules_to_save lora_target_parameters peft_layers_to_transform peft_layers_pattern "
            "peft_layer_replication peft_init_lora_weights peft_trainable_token_indices lora_model_dir "
            "lora_fan_in_fan_out relora relora_steps relora_warmup_steps relora_prune_ratio adapter_name_or_path "
            "additional_target create_new_adapter pissa_init pissa_iter pissa_convert"
        ),
        "use trainable, such as {last_layers: 2, lm_head: true}": (
            "unfrozen_parameters freeze_trainable_modules freeze_extra_modules use_llama_pro"
        ),
        "there is no context or tensor parallelism": (
            "sequence_parallel_degree context_parallel_size tensor_parallel_size heads_k_stride ring_attn_func "
            "parallelism_config dp_shard_size dp_replicate_size expert_parallel_size"
        ),
        "activations are not offloaded; use gradient_checkpointing": "activation_offloading",
        "plug-ins of other trainers are not supported": "plugins model_init_kwargs overrides_of_model_config",
        "the reference model is the initial model of the stage, unchanged": (
            "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_model ref_model_adapters "
            "ref_model_quantization_bit model_adapter_name ref_adapter_name reference_free force_use_ref_model"
        ),
        "one preference loss at a time, with equal weight for every pair": (
            "rpo_alpha ld_alpha loss_weights f_divergence_type f_alpha_divergence_coef use_weighting "
            "dpo_use_weighting discopop_tau pref_ftx pref_bco_weight dpo_norm_loss"
        ),
        "rows are shuffled in every epoch": "curriculum_sampling sample_packing_sequentially ignore_data_skip",
        "set it in the shell before the command": "env",
        "metrics of other tools are not computed; use gates and evaluate": (
            "do_bench_eval bench_dataset bench_split eval_causal_lm_metrics do_causal_lm_eval eval_table_size "
            "eval_max_new_tokens include_for_metrics batch_eval_metrics compute_accuracy predict_with_generate "
            "eval_on_each_dataset eval_num_beams"
        ),
        "context extension by positions is not supported": (
            "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks rope_scaling shift_attn "
            "mixture_of_depths overrides_of_model_kwargs"
        ),
        "extra labels and reward models are not supported": "label_names reward_model process_reward_model num_labels",
    },
    "approximated": {
        "seed also sets the data order": "data_seed",
        "the spike guard skips steps (spike_factor, max_skipped_steps)": (
            "loss_watchdog_threshold loss_watchdog_patience"
        ),
        "modelwright data audit finds duplicate rows": "dataset_exact_deduplication",
        "max_length limits prompt and answer together": "max_prompt_len max_prompt_length max_completion_length",
        "evaluation uses the precision of the stage": "bf16_full_eval fp16_full_eval",
        "the run is named after the recipe (name)": "run_name wandb_name wandb_run_id",
        "set it in the environment: WANDB_PROJECT, WANDB_ENTITY, MLFLOW_TRACKING_URI": (
            "wandb_entity wandb_watch wandb_log_model wandb_mode mlflow_experiment_name project "
            "hf_mlflow_log_artifacts trackio_space_id trackio_bucket_id trackio_static_space_id"
        ),
        "profile_memory: true profiles the memory of a step": "profiler_steps skip_memory_metrics",
        "a run resumes by itself; to start from a checkpoint set resume_from_checkpoint or model_name_or_path": (
            "resume_from_checkpoint auto_resume_from_checkpoints"
        ),
    },
    "not_needed": {
        "metrics are always logged to the journal, the report and TensorBoard files": (
            "plot_loss include_effective_tokens_per_second print_param_status logging_dir "
            "logging_first_step log_level log_level_replica log_on_each_node disable_tqdm logging_nan_inf_filter "
            "include_num_input_tokens_seen include_tokens_per_second use_tensorboard include_tkps logging_strategy"
        ),
        "the device is detected": (
            "use_cpu no_cuda device device_map local_rank world_size ddp max_memory gpu_memory_limit "
            "low_cpu_mem_usage use_mps_device ddp_backend lora_on_cpu"
        ),
        "batches are read without worker processes, in an order that follows from the seed": (
            "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last "
            "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dataset_num_proc "
            "dataset_processes dataset_prepared_path dataset_keep_in_memory remove_unused_columns group_by_length "
            "length_column_name train_sampling_strategy skip_prepare_dataset preprocess_iterable dataset_shard_num "
            "dataset_shard_idx dataset_kwargs sample_packing_group_size sample_packing_bin_size "
            "sample_packing_eff_est multipack_real_batches shuffle_dataset shuffle_merged_datasets "
            "shuffle_before_merging_datasets shuffle_buffer_size streaming_multipack_buffer_size "
            "pretrain_multipack_buffer_size pretraining_sample_concatenation pretrain_multipack_attn "
            "train_dataset_sizes dataset_streaming streaming dataset_load_from_cache_file overwrite_cache cache_dir "
            "preprocessing_num_workers preprocessing_batch_size tokenized_path data_shared_file_system buffer_size"
        ),
        "rows are laid end to end on a GPU, or padded to the longest of their micro-batch, or packed": (
            "pad_to_sequence_len pad_to_multiple_of batch_flattening padding_free eval_packing eval_sample_packing "
            "ignore_pad_token_for_loss label_pad_token_id"
        ),
        "the loss is divided by the trained tokens of all devices": "average_tokens_across_devices",
        "kernels are chosen automatically, with a chunked cross-entropy loss": (
            "use_liger_kernel liger_kernel_config flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv "
            "flash_attn_fuse_mlp unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o "
            "unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm "
            "liger_swiglu liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy "
            "cut_cross_entropy torch_compile_backend torch_compile_mode torch_empty_cache_steps gc_steps use_cache "
            "flex_attn_compile_kwargs chunked_cross_entropy chunked_cross_entropy_num_chunks dpo_use_logits_to_keep "
            "enable_liger_kernel use_unsloth use_unsloth_gc upcast_layernorm upcast_lmhead_output "
            "use_v1_kernels"
        ),
        "activation checkpointing is non-reentrant": "gradient_checkpointing_kwargs use_reentrant use_reentrant_gc",
        "reference log-probabilities are precomputed once and cached": (
            "precompute_ref_log_probs precompute_ref_batch_size"
        ),
        "modelwright launch starts and supervises the processes": (
            "ddp_timeout ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph debug accelerator_config "
            "ignore_bias_buffers fsdp_final_state_dict_type fsdp_version"
        ),
        "checkpoints are complete, verified and in safetensors": (
            "save_safetensors save_only_model save_on_each_node enable_jit_checkpoint save_strategy_of_hub "
            "restore_callback_states_from_checkpoint qlora_sharded_model_loading merge_lora merge_method"
        ),
        "the held-out loss is evaluated before the first step and after the last": (
            "eval_on_start do_eval do_train do_predict prediction_loss_only eval_accumulation_steps "
            "eval_do_concat_batches eval_use_gather_object greater_is_better"
        ),
        "a run is resumed or refused, never overwritten": "overwrite_output_dir",
        "it is read from the model": (
            "model_type tokenizer_type is_llama_derived_model is_mistral_derived_model processor_type "
            "is_falcon_derived_model is_qwen_derived_model base_model_config base_model_ignore_patterns "
            "lora_task_type cls_model_config peft_autocast_adapter_dtype is_encoder_decoder padding_value "
            "use_fast_tokenizer"
        ),
        "recipes are always validated strictly": "strict",
    },
}
FOREIGN_KEYS: Mapping[str, tuple[ConversionLoss, str]] = {
    name: (loss, advice)
    for loss, table in _FOREIGN_KEYS.items()
    for advice, names in table.items()
    for name in names.split()
}
"""Settings of other tools without a counterpart of one name: how much is lost, and what to do instead."""
MEANINGFUL_WHEN_FALSE = frozenset(
    {"average_tokens_across_devices", "shuffle_merged_datasets", "pretrain_multipack_attn", "disable_dropout"}
)
"""Names for which false is a request too."""
