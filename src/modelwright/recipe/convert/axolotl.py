"""Convert a configuration of axolotl, as ``axolotl train`` reads it."""

from __future__ import annotations

from modelwright.recipe.convert.common import (
    Conversion,
    as_float,
    convert_dataset,
    convert_eval_and_save,
    convert_lora,
    convert_optimizer,
    convert_report_to,
    convert_scheduler,
    convert_sharding,
    convert_test_split,
    report_extra_datasets,
)
from modelwright.recipe.source import ConfigNode

ATTENTION = {
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
PROMPT_FORMATS = {
    "alpaca": {"instruction": "prompt", "input": "context", "output": "completion"},
    "alpaca_chat.load_qa": {"question": "prompt", "answer": "completion"},
    "alpaca_w_system.load_open_orca": {"system_prompt": "system", "question": "prompt", "response": "completion"},
    "gpteacher": {"instruction": "prompt", "input": "context", "response": "completion"},
    "oasst": {"INSTRUCTION": "prompt", "RESPONSE": "completion"},
    "summarizetldr": {"article": "prompt", "summary": "completion"},
    "context_qa": {"article": "context", "question": "prompt", "answer": "completion"},
}
"""What the columns of its named formats are."""
PREFERENCE_FORMATS = {
    "intel": {"question": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "prompt_pairs": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "ultra": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "icr": {"input": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "argilla": {"instruction": "prompt", "chosen_response": "chosen", "rejected_response": "rejected"},
}
"""The same for its formats of pairs, by what stands behind the dot: chatml.intel, llama3.intel."""
FIELD_ROLES = {
    "field_instruction": "prompt", "field_input": "context", "field_output": "completion", "field_system": "system",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
OFFLOAD_MARKERS = ("offload", "unsloth")
"""What its words for activations that are kept elsewhere have in them."""
OWN_ATTENTION = "PyTorch's own attention is taken; attn_implementation: flash_attention_2 asks for another"
NO_TEMPLATE = "the model's own chat template is used in place of that format's"


def convert_axolotl(conversion: Conversion) -> None:
    """Take what wants a rule of its own; names that both tools share are carried afterwards."""
    stage = conversion.stage
    convert_eval_and_save(conversion, as_float(conversion.source.get("num_epochs"), 1.0))
    _method(conversion)
    _model(conversion)
    _data(conversion)
    convert_optimizer(conversion, "optimizer")
    convert_scheduler(conversion, "lr_scheduler")
    convert_sharding(conversion)
    _numbers(conversion)
    _trackers(conversion)
    micro = conversion.source.get("micro_batch_size")
    defaults = {
        "warmup_steps": "3%", "max_length": 512, "per_device_train_batch_size": 1, "load_best_model_at_end": False,
        "per_device_eval_batch_size": 1 if micro is None else micro.value,
    }  # fmt: skip
    for name, value in defaults.items():
        conversion.set_default(f"{stage}.{name}", value)


def _method(conversion: Conversion) -> None:
    rl = conversion.pop("rl")
    if rl is not None:
        conversion.converted.append("rl")
        if str(rl.value).lower() == "ipo":
            conversion.set("dpo.loss_type", "ipo", comment="rl: ipo")
    beta = conversion.pop("rl_beta") or conversion.pop("dpo_beta")
    nested = conversion.pop("trl")
    for name, node in (nested.mapping if nested is not None else {}).items():
        if name == "beta" and beta is None and conversion.stage == "dpo":
            conversion.set("dpo.beta", node, source_key="trl.beta")
        else:
            conversion.report(f"trl.{name}", node, "unsupported", "the settings of online methods have no place here")
    if beta is not None and conversion.stage == "dpo":
        conversion.set("dpo.beta", beta, source_key="rl_beta")


def _model(conversion: Conversion) -> None:
    adapter = conversion.pop("adapter")
    kind = "" if adapter is None else str(adapter.value).lower()
    linear, targets = conversion.pop("lora_target_linear"), conversion.pop("lora_target_modules")
    uses_lora = kind in ("lora", "qlora")
    if adapter is not None and not uses_lora:
        conversion.report(
            "adapter", adapter, "unsupported", "there is LoRA, with or without quantised weights; all weights move here"
        )
    conversion.converted += ["adapter"] if uses_lora else []
    convert_lora(conversion, uses_lora)
    if linear is not None and uses_lora:
        conversion.set(f"{conversion.stage}.lora_target_modules", "all-linear", source_key="lora_target_linear")
    elif targets is not None and uses_lora:
        conversion.set(f"{conversion.stage}.lora_target_modules", targets, source_key="lora_target_modules")
    for name, node in (("lora_target_linear", linear), ("lora_target_modules", targets)):
        if node is not None and not uses_lora:
            conversion.report(name, node, "not_needed", "no low-rank matrices are trained")
        elif node is not None and name not in conversion.converted:
            conversion.report(name, node, "not_needed", "all linear layers are meant")
    for name, ours in ATTENTION.items():
        if conversion.pop(name) is not None:
            conversion.set("model.attn_implementation", ours, source_key=name, comment=name)
    for name in ("flash_attention", "xformers_attention", "s2_attention", "sage_attention", "flash_optimum"):
        node = conversion.pop(name)
        if node is not None:
            conversion.report(
                name,
                node,
                "approximated",
                OWN_ATTENTION,
            )
    revision = conversion.pop("revision_of_model")
    if revision is not None:
        conversion.set("model.revision", revision, source_key="revision_of_model")
    tokenizer = conversion.pop("tokenizer_config")
    if tokenizer is not None:
        conversion.report("tokenizer_config", tokenizer, "unsupported", "a model brings its own tokenizer")


def _numbers(conversion: Conversion) -> None:
    """Precision and the switches whose words differ."""
    stage = conversion.stage
    bfloat16, float16, fp8 = (conversion.pop(name) for name in ("bfloat16", "float16", "fp8"))
    float32 = conversion.pop("float32")
    for name, node, ours in (
        ("bfloat16", bfloat16, "bf16"),
        ("float16", float16, "fp16"),
        ("float32", float32, "fp32"),
    ):
        if node is not None and "bf16" not in conversion.source and "fp16" not in conversion.source:
            conversion.set(f"{stage}.precision", ours, source_key=name, comment=name)
        elif node is not None:
            conversion.report(name, node, "not_needed", "bf16 or fp16 says what is computed in")
    if fp8 is not None:
        for name in ("bf16", "fp16"):
            node = conversion.source.pop(name, None)
            if node is not None:
                conversion.report(name, node, "not_needed", "fp8 computes in fp8, the rest in bf16")
        conversion.set(f"{stage}.precision", "fp8", source_key="fp8")
    recompute = conversion.source.get("gradient_checkpointing")
    if recompute is not None and any(marker in str(recompute.value).lower() for marker in OFFLOAD_MARKERS):
        conversion.set(f"{stage}.gradient_checkpointing", True, comment=f"nearest to {recompute.value}")
        conversion.report(
            "gradient_checkpointing", recompute, "approximated", "activations are computed again, not offloaded"
        )
        del conversion.source["gradient_checkpointing"]
    compiled = conversion.pop("torch_compile")
    if compiled is not None:
        conversion.set(f"{stage}.torch_compile", True, source_key="torch_compile")
    total = conversion.pop("batch_size")
    if total is not None:
        conversion.set(f"{stage}.global_batch_size", total, source_key="batch_size")
    floor = conversion.pop("cosine_min_lr_ratio") or conversion.pop("cosine_constant_lr_ratio")
    if floor is not None:
        conversion.report("cosine_min_lr_ratio", floor, "unsupported", "a cosine falls to zero")
    packed = conversion.pop("sample_packing")
    if packed is not None and stage == "sft":
        conversion.set("sft.packing", packed, source_key="sample_packing")
    elif packed is not None:
        conversion.report("sample_packing", packed, "not_needed", f"{stage} packs by itself, or has nothing to pack")
    train_on_inputs = conversion.source.pop("train_on_inputs", None)
    if train_on_inputs is not None and train_on_inputs.value is not None and stage == "sft":
        conversion.set(
            "sft.assistant_only_loss",
            train_on_inputs.value is not True,
            source_key="train_on_inputs",
            comment="train_on_inputs",
        )
    elif train_on_inputs is not None:
        conversion.report("train_on_inputs", train_on_inputs, "not_needed", f"{stage} has no prompts to leave out")


def _trackers(conversion: Conversion) -> None:
    tracker_names = []
    for name, tracker in (("wandb_project", "wandb"), ("mlflow_tracking_uri", "mlflow"), ("use_wandb", "wandb")):
        node = conversion.pop(name)
        if node is not None:
            tracker_names.append(tracker)
            conversion.report(
                name, node, "approximated", f"report_to: {tracker} is written; the environment says the rest"
            )
    if tracker_names:
        convert_report_to(conversion, ["tensorboard", *dict.fromkeys(tracker_names)], None, "report_to")
    for name in ("use_comet", "comet_project_name", "swanlab_project", "use_swanlab"):
        node = conversion.pop(name)
        if node is not None:
            conversion.report(name, node, "unsupported", "that tracker is not told")


def _data(conversion: Conversion) -> None:
    name = "pretraining_dataset" if "pretraining_dataset" in conversion.source else "datasets"
    datasets = conversion.pop(name)
    if datasets is None:
        return
    items = datasets.value if isinstance(datasets.value, list) else [datasets]
    first = items[0]
    entry = dict(first.mapping) if isinstance(first.value, dict) else {"path": first}
    label = f"{name}[0]"
    convert_dataset(conversion, entry, label)
    if conversion.stage == "pretrain":
        column = entry.pop("text_column", None) or entry.pop("field", None)
        if column is not None:
            conversion.set("data.text_column", column, source_key=f"{label}.text_column")
        kind = entry.pop("type", None)
        conversion.converted += [f"{label}.type"] if kind is not None else []
    else:
        _format(conversion, entry, label)
    _details(conversion, entry, label)
    report_extra_datasets(conversion, items[1:], name)
    _template(conversion)
    _held_out(conversion)


def _format(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """What the columns are, by the format that the entry names or spells out."""
    kind = entry.pop("type", None)
    if kind is not None and isinstance(kind.value, dict):
        _convert_custom_format(conversion, kind, label)
        return
    format_name = "" if kind is None else str(kind.value)
    messages = entry.pop("field_messages", None)
    if format_name.startswith(("chat_template", "sharegpt")) and conversion.stage == "sft":
        column = "conversations" if format_name.startswith("sharegpt") else "messages"
        column = column if messages is None else str(messages.value)
        if column != "messages":
            conversion.set("data.columns", {column: "messages"}, source_key=f"{label}.field_messages")
        conversion.converted.append(f"{label}.type")
        return
    columns = (
        PROMPT_FORMATS.get(format_name)
        if conversion.stage == "sft"
        else PREFERENCE_FORMATS.get(format_name.rpartition(".")[2])
    )
    fields = {key: entry.pop(key) for key in ("field_chosen", "field_rejected") if key in entry}
    if columns is None and fields:
        columns = {str(node.value): FIELD_ROLES[key] for key, node in fields.items()}
        conversion.converted += [f"{label}.{key}" for key in fields]
    if columns is not None:
        conversion.set("data.columns", columns, comment=f"type: {format_name}")
        conversion.report(f"{label}.type", kind, "approximated", NO_TEMPLATE)
    elif kind is not None:
        conversion.report(
            f"{label}.type", kind, "unsupported", "say which column is which: data.columns: {QUESTION: prompt, …}"
        )
    if messages is not None:
        conversion.set(
            "data.columns", {str(messages.value): "prompt", **(columns or {})}, source_key=f"{label}.field_messages"
        )


def _convert_custom_format(conversion: Conversion, kind: ConfigNode, label: str) -> None:
    columns = {}
    for name, node in kind.mapping.items():
        if name in FIELD_ROLES:
            columns[str(node.value)] = FIELD_ROLES[name]
            conversion.converted.append(f"{label}.type.{name}")
        elif name == "system_prompt" and node.value:
            conversion.set("data.system_prompt", node, source_key=f"{label}.type.system_prompt")
        elif node.value:
            conversion.report(f"{label}.type.{name}", node, "approximated", NO_TEMPLATE)
    if columns:
        conversion.set("data.columns", columns)


def _details(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """What else an entry says: which turns are learnt, and how they are called."""
    names = {"message_field_role": ("role", "from"), "message_field_content": ("content", "value")}
    mapping = entry.pop("message_property_mappings", None)
    mapped_fields = {
        f"message_field_{key}": node for key, node in (mapping.mapping if mapping is not None else {}).items()
    }
    for name, node in {**entry, **mapped_fields}.items():
        key = f"{label}.{name}"
        if name in names and str(node.value) in names[name]:
            conversion.converted.append(key)
        elif name in names:
            conversion.report(key, node, "unsupported", "a turn has role and content, or from and value")
        elif name == "roles_to_train" and conversion.stage == "sft":
            roles = [str(item.value) for item in node.value] if isinstance(node.value, list) else []
            assistant_only = bool(roles) and set(roles) <= {"assistant", "gpt"}
            conversion.set(
                "sft.assistant_only_loss", assistant_only, source_key=key, comment=f"roles_to_train: {', '.join(roles)}"
            )
        elif name == "train_on_eos" and str(node.value) == "turn":
            conversion.report(key, node, "not_needed", "the end of each answer is learnt")
        elif name in ("chat_template", "roles", "conversation"):
            conversion.report(key, node, "approximated", "the model's own template and roles are used")
        elif node.value is None or node.value is False:
            conversion.report(key, node, "not_needed", "")
        else:
            conversion.report(
                key, node, "unsupported", "an entry of datasets has no such word here; make the rows so beforehand"
            )


def _template(conversion: Conversion) -> None:
    node = conversion.pop("chat_template")
    if node is not None and str(node.value).startswith("tokenizer_default"):
        conversion.report("chat_template", node, "not_needed", "the model's own template is used")
    elif node is not None:
        conversion.report(
            "chat_template", node, "approximated", "the model's own template is used; change it in its folder"
        )
    system = conversion.pop("default_system_message")
    if system is not None:
        conversion.set("data.system_prompt", system, source_key="default_system_message")


def _held_out(conversion: Conversion) -> None:
    tests, test_size = conversion.pop("test_datasets"), conversion.source.pop("val_set_size", None)
    if tests is not None and isinstance(tests.value, list):
        path = tests.value[0].get(("data_files",)) or tests.value[0].get(("path",))
        if path is not None and isinstance(path.value, list):
            path = path.value[0]
        if path is not None and isinstance(path.value, str) and ("." in path.value.rpartition("/")[2]):
            conversion.set("data.validation_file", path, source_key="test_datasets[0].path")
        else:
            advice = "a split of a set is not measured; 10% of the questions are held out, or name data.validation_file"
            conversion.report("test_datasets", tests, "approximated", advice)
            conversion.set("data.test_size", "10%", comment="in place of test_datasets")
            return
    if conversion.get("data.validation_file") is not None and test_size is not None:
        conversion.report("val_set_size", test_size, "not_needed", "test_datasets measure")
        return
    convert_test_split(conversion, test_size, "val_set_size")
