"""What is said about settings of TRL, transformers and axolotl that have no counterpart of one name in a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from modelwright.recipe.moved import Kind

_LOST: Mapping[str, tuple[str, ...]] = {
    "noise on embeddings is not offered": ("neftune_noise_alpha", "noisy_embedding_alpha"),
    "labels of text are not smoothed here": ("label_smoothing_factor",),
    "all moving weights share one learning rate and one optimizer": (
        *("optim_args", "optim_target_modules", "lr_groups", "embedding_lr", "embedding_lr_scale"),
        *("loraplus_lr_ratio", "loraplus_lr_embedding", "adam_beta3", "adam_epsilon2", "lr_quadratic_warmup"),
        *("lr_div_factor", "router_aux_loss_coef", "optimizer_cls_and_kwargs"),
    ),
    "batches are not searched for by trial; modelwright plan says what fits": ("auto_find_batch_size",),
    "nothing is uploaded; modelwright export writes a folder for hf upload": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
        *("hub_token", "push_dataset_to_hub", "hf_use_auth_token", "save_first_step"),
    ),
    "code from the hub is never run": ("trust_remote_code",),
    "a run is not stopped early; load_best_model_at_end keeps the best weights": (
        *("early_stopping_patience", "eval_delay"),
    ),
    "the tokenizer is taken as it is": (
        *("special_tokens", "tokens", "added_tokens_overrides", "eos_token", "pad_token", "eot_tokens"),
        *("resize_token_embeddings_to_32x", "shrink_embeddings", "tokenizer_config", "tokenizer_use_fast"),
        *("tokenizer_legacy", "tokenizer_use_mistral_common", "added_tokens", "chat_template_path"),
        *("chat_template_jinja", "fix_untrained_tokens", "mean_resizing_embeddings"),
    ),
    "quantised weights are nf4 or int8 as bitsandbytes makes them": (
        *("use_bnb_nested_quant", "bnb_4bit_quant_storage", "bnb_config_kwargs", "gptq", "peft", "qat"),
        *("quantization", "loftq_config", "model_quantization_config", "model_quantization_config_kwargs"),
    ),
    "low-rank matrices sit beside whole linear layers; no other modules are saved with them": (
        *("lora_modules_to_save", "lora_target_parameters", "peft_layers_to_transform", "peft_layers_pattern"),
        *("peft_layer_replication", "peft_init_lora_weights", "peft_trainable_token_indices", "lora_model_dir"),
        *("lora_fan_in_fan_out", "relora", "relora_steps", "relora_warmup_steps", "relora_prune_ratio"),
    ),
    "which weights move is said by trainable, such as {last_layers: 2, head: true}": ("unfrozen_parameters",),
    "rows are not split over devices; there is no context or tensor parallelism": (
        *("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size", "heads_k_stride"),
        *("ring_attn_func", "parallelism_config", "dp_shard_size", "dp_replicate_size", "expert_parallel_size"),
    ),
    "activations stay on the device; gradient_checkpointing is there": ("activation_offloading",),
    "plug-ins of other trainers are not loaded": ("plugins", "model_init_kwargs", "overrides_of_model_config"),
    "the reference is the model that the stage began with, unchanged": (
        *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    ),
    "there is one loss of preferences at a time, over every pair alike": (
        *("rpo_alpha", "ld_alpha", "loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting"),
        *("dpo_use_weighting", "discopop_tau"),
    ),
    "rows are shuffled, each epoch anew": ("curriculum_sampling", "sample_packing_sequentially", "ignore_data_skip"),
    "set it in the shell before the command": ("env",),
    "there is no curve of another tool's metric here; gates and evaluate measure": (
        *("do_bench_eval", "bench_dataset", "bench_split", "eval_causal_lm_metrics", "do_causal_lm_eval"),
        *("eval_table_size", "eval_max_new_tokens", "include_for_metrics", "batch_eval_metrics"),
    ),
    "long positions are not trained this way": (
        *("use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks"),
        *("rope_scaling", "overrides_of_model_kwargs"),
    ),
    "a row has no extra losses or labels": ("label_names", "reward_model", "process_reward_model", "num_labels"),
}
_NEAREST: Mapping[str, tuple[str, ...]] = {
    "seed decides the order of data too": ("data_seed",),
    "the guard skips leaps of gradient and loss (spike_factor, max_skipped_steps)": (
        *("loss_watchdog_threshold", "loss_watchdog_patience"),
    ),
    "data.derive makes columns; audit finds the same row twice: modelwright data audit": (
        *("dataset_exact_deduplication",),
    ),
    "longest prompt and answer together are max_length": ("max_prompt_len", "max_prompt_length"),
    "gradients and activations are in the precision of the stage": ("bf16_full_eval", "fp16_full_eval"),
    "the model card and lineage.json say what the run was called": ("run_name", "wandb_name", "wandb_run_id"),
    "the environment says it: WANDB_PROJECT, WANDB_ENTITY, MLFLOW_TRACKING_URI": (
        *("wandb_entity", "wandb_watch", "wandb_log_model", "wandb_mode", "mlflow_experiment_name", "project"),
        *("hf_mlflow_log_artifacts", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    ),
    "profile_memory: true watches the memory of a step": ("profiler_steps", "skip_memory_metrics"),
    "the first step of a new run begins from the model; a model folder may be model_name_or_path": (
        *("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    ),
}
_UNNEEDED: Mapping[str, tuple[str, ...]] = {
    "the run keeps a journal, a report and event files": (
        *("logging_dir", "logging_first_step", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
        *("logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second", "use_tensorboard"),
        *("include_tkps", "logging_strategy"),
    ),
    "the device is found by itself": (
        *("use_cpu", "no_cuda", "device", "device_map", "local_rank", "world_size", "ddp", "max_memory"),
        *("gpu_memory_limit", "low_cpu_mem_usage", "use_mps_device", "ddp_backend", "lora_on_cpu"),
    ),
    "batches are read and packed without workers of their own, in an order that is a function": (
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last"),
        *("dataloader_persistent_workers", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("dataset_num_proc", "dataset_processes", "dataset_prepared_path", "dataset_keep_in_memory"),
        *("remove_unused_columns", "group_by_length", "length_column_name", "train_sampling_strategy"),
        *("skip_prepare_dataset", "preprocess_iterable", "dataset_shard_num", "dataset_shard_idx", "dataset_kwargs"),
        *("sample_packing_group_size", "sample_packing_bin_size", "sample_packing_eff_est", "multipack_real_batches"),
        *("shuffle_dataset", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
        *("shuffle_buffer_size", "streaming_multipack_buffer_size", "pretrain_multipack_buffer_size"),
        *("pretraining_sample_concatenation", "pretrain_multipack_attn", "train_dataset_sizes"),
        *("dataset_streaming", "streaming", "dataset_load_from_cache_file"),
    ),
    "rows are padded to the longest of their micro-batch, or packed": (
        *("pad_to_sequence_len", "pad_to_multiple_of", "batch_flattening", "padding_free", "eval_packing"),
        *("eval_sample_packing",),
    ),
    "the loss is divided by the trained tokens of all devices": ("average_tokens_across_devices",),
    "kernels are chosen by themselves, with a loss that never holds all logits": (
        *("use_liger_kernel", "liger_kernel_config", "flash_attn_cross_entropy", "flash_attn_rms_norm"),
        *("flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "unsloth_cross_entropy_loss", "unsloth_lora_mlp"),
        *("unsloth_lora_qkv", "unsloth_lora_o", "unsloth_rms_norm", "unsloth_rope", "lora_mlp_kernel"),
        *("lora_qkv_kernel", "lora_o_kernel", "liger_rope", "liger_rms_norm", "liger_swiglu", "liger_glu_activation"),
        *("liger_layer_norm", "liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy"),
        *("torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "gc_steps"),
        *("use_cache", "flex_attn_compile_kwargs", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"),
        *("dpo_use_logits_to_keep", "full_determinism"),
    ),
    "activations are computed again without reentrance; there is nothing to set": (
        *("gradient_checkpointing_kwargs", "use_reentrant"),
    ),
    "references are computed once and kept beside the run": (
        *("precompute_ref_log_probs", "precompute_ref_batch_size"),
    ),
    "processes are joined and guarded by modelwright launch": (
        *("ddp_timeout", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph", "debug"),
        *("accelerator_config", "ignore_bias_buffers", "fsdp_final_state_dict_type", "fsdp_version"),
    ),
    "checkpoints are complete, verified and safetensors": (
        *("save_safetensors", "save_only_model", "save_on_each_node", "enable_jit_checkpoint", "save_strategy_of_hub"),
        *("restore_callback_states_from_checkpoint", "qlora_sharded_model_loading", "merge_lora", "merge_method"),
    ),
    "held-out loss is measured before the first step and after the last": (
        *("eval_on_start", "do_eval", "do_train", "do_predict", "prediction_loss_only", "eval_accumulation_steps"),
        *("eval_do_concat_batches", "eval_use_gather_object", "greater_is_better"),
    ),
    "a run is resumed or refused, never overwritten": ("overwrite_output_dir",),
    "the model says what it is": (
        *("model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived_model", "processor_type"),
        *("is_falcon_derived_model", "is_qwen_derived_model", "base_model_config", "base_model_ignore_patterns"),
        *("lora_task_type", "cls_model_config", "peft_autocast_adapter_dtype"),
    ),
    "a mistake in a recipe is always an error": ("strict",),
}


def _table() -> dict[str, tuple[Kind, str]]:
    kinds: tuple[tuple[Kind, Mapping[str, tuple[str, ...]]], ...] = (
        ("lost", _LOST), ("nearest", _NEAREST), ("unneeded", _UNNEEDED)
    )  # fmt: skip
    return {name: (kind, advice) for kind, table in kinds for advice, names in table.items() for name in names}


ADVICE = _table()
"""For each such name how much is lost, and why."""

NEEDED_WHEN_OFF = frozenset(
    {"average_tokens_across_devices", "shuffle_merged_datasets", "pretrain_multipack_attn", "disable_dropout"}
)
"""Names whose false asks for something."""
