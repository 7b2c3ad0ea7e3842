"""Convert a configuration of axolotl, as ``axolotl train`` reads it."""

from __future__ import annotations

from modelwright.recipe.convert.common import (
    NO_LORA,
    NO_TEST_SPLIT,
    OWN_ATTENTION,
    OWN_TEMPLATE,
    Conversion,
    as_float,
    convert_dataset,
    convert_datasets,
    convert_eval_and_save,
    convert_lora,
    convert_optimizer,
    convert_report_to,
    convert_scheduler,
    convert_sharding,
    convert_test_split,
)
from modelwright.recipe.source import ConfigNode

ATTENTION = {"sdp_attention": "sdpa", "flex_attention": "flex_attention", "eager_attention": "eager"}
UNSUPPORTED_ATTENTION = ("flash_attention", "xformers_attention", "s2_attention", "sage_attention", "flash_optimum")
PROMPT_FORMATS = {
    "alpaca": {"instruction": "prompt", "input": "context", "output": "completion"},
    "alpaca_chat.load_qa": {"question": "prompt", "answer": "completion"},
    "alpaca_w_system.load_open_orca": {"system_prompt": "system", "question": "prompt", "response": "completion"},
    "gpteacher": {"instruction": "prompt", "input": "context", "response": "completion"},
    "oasst": {"INSTRUCTION": "prompt", "RESPONSE": "completion"},
    "summarizetldr": {"article": "prompt", "summary": "completion"},
    "context_qa": {"article": "context", "question": "prompt", "answer": "completion"},
}
"""Column roles of the named prompt formats."""
_ANSWERS = {"chosen": "chosen", "rejected": "rejected"}
PREFERENCE_FORMATS = {
    "intel": {"question": "prompt", **_ANSWERS},
    "prompt_pairs": {"prompt": "prompt", **_ANSWERS},
    "ultra": {"prompt": "prompt", **_ANSWERS},
    "icr": {"input": "prompt", **_ANSWERS},
    "argilla": {"instruction": "prompt", "chosen_response": "chosen", "rejected_response": "rejected"},
}
"""The same for preference formats, by the part after the dot: chatml.intel, llama3.intel."""
FIELD_ROLES = {
    "field_instruction": "prompt", "field_input": "context", "field_output": "completion", "field_system": "system",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
OFFLOAD_MARKERS = ("offload", "unsloth")
"""Parts of the values of gradient_checkpointing that offload activations."""


def convert_axolotl(conversion: Conversion) -> None:
    """Convert the settings that need a rule; names that both tools share are converted afterwards."""
    convert_eval_and_save(conversion, as_float(conversion.source.get("num_epochs"), 1.0))
    _convert_method(conversion)
    _convert_model(conversion)
    _convert_data(conversion)
    convert_optimizer(conversion, "optimizer")
    convert_scheduler(conversion, "lr_scheduler")
    convert_sharding(conversion)
    _convert_precision(conversion)
    _convert_batch_and_loss(conversion)
    _convert_trackers(conversion)
    micro = conversion.source.get("micro_batch_size")
    conversion.set_defaults({
        "warmup_steps": "3%", "max_length": 512, "per_device_train_batch_size": 1, "load_best_model_at_end": False,
        "per_device_eval_batch_size": 1 if micro is None else micro.value,
    })  # fmt: skip


def _convert_method(conversion: Conversion) -> None:
    rl = conversion.pop("rl")
    if rl is not None:
        conversion.converted.append("rl")
        for name, value in conversion.spec.methods.get(str(rl.value).lower(), {}).items():
            conversion.set(f".{name}", value, comment=f"rl: {rl.value}")
    betas = conversion.spec.aliases.get("beta", "").split()
    nested = conversion.pop("trl")
    if nested is not None and not nested.mapping:
        conversion.report("trl", nested, "unsupported", "it wants a mapping")
    for name, node in (nested.mapping if nested is not None else {}).items():
        if name == "beta" and betas and not any(beta in conversion.source for beta in betas):
            conversion.set(".beta", node, source_key="trl.beta")
        else:
            conversion.report(f"trl.{name}", node, "unsupported", "online methods are not supported")


def _convert_model(conversion: Conversion) -> None:
    adapter = conversion.pop("adapter")
    linear, targets = conversion.pop("lora_target_linear"), conversion.pop("lora_target_modules")
    uses_lora = adapter is not None and str(adapter.value).lower() in ("lora", "qlora")
    if adapter is not None and not uses_lora:
        conversion.refuse(f"this trains by adapter: {adapter.value}, which is not offered; what is: lora, qlora")
    conversion.converted += ["adapter"] if uses_lora else []
    convert_lora(conversion, uses_lora)
    if linear is not None and uses_lora:
        conversion.set(".lora_target_modules", "all-linear", source_key="lora_target_linear")
    elif targets is not None and uses_lora:
        conversion.set(".lora_target_modules", targets, source_key="lora_target_modules")
    for name, node in (("lora_target_linear", linear), ("lora_target_modules", targets)):
        if node is not None and name not in conversion.converted:
            advice = "all linear layers are adapted" if uses_lora else NO_LORA
            conversion.report(name, node, "not_needed", advice)
    for name, ours in ATTENTION.items():
        if conversion.pop(name) is not None:
            conversion.set("model.attn_implementation", ours, source_key=name, comment=name)
    conversion.report_if_set(UNSUPPORTED_ATTENTION, "approximated", OWN_ATTENTION)
    conversion.rename("revision_of_model", "model.revision")
    conversion.report_if_set(["tokenizer_config"], "unsupported", "the tokenizer of the model is used")


def _convert_precision(conversion: Conversion) -> None:
    for name, ours in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        node = conversion.pop(name)
        if node is not None and "bf16" not in conversion.source and "fp16" not in conversion.source:
            conversion.set(".precision", ours, source_key=name, comment=name)
        elif node is not None:
            conversion.report(name, node, "not_needed", "bf16 or fp16 sets the precision")
    if conversion.pop("fp8") is not None:
        for name in ("bf16", "fp16"):
            node = conversion.source.pop(name, None)
            if node is not None:
                conversion.report(name, node, "not_needed", "fp8 computes the rest in bf16")
        conversion.set(".precision", "fp8", source_key="fp8")
    checkpointing = conversion.source.get("gradient_checkpointing")
    if checkpointing is not None and any(each in str(checkpointing.value).lower() for each in OFFLOAD_MARKERS):
        conversion.set(".gradient_checkpointing", True, comment=f"nearest to {checkpointing.value}")
        advice = "activations are recomputed, not offloaded"
        conversion.report("gradient_checkpointing", checkpointing, "approximated", advice)
        del conversion.source["gradient_checkpointing"]


def _convert_batch_and_loss(conversion: Conversion) -> None:
    stage = conversion.stage
    if conversion.pop("torch_compile") is not None:
        conversion.set(".torch_compile", True, source_key="torch_compile")
    conversion.rename("batch_size", f"{stage}.global_batch_size")
    min_lr_names = ("cosine_min_lr_ratio", "cosine_constant_lr_ratio")
    conversion.report_if_set(min_lr_names, "unsupported", "the cosine schedule decays to zero")
    packing = conversion.pop("sample_packing")
    if packing is not None and conversion.has("packing"):
        conversion.set(".packing", packing, source_key="sample_packing")
    elif packing is not None:
        conversion.report("sample_packing", packing, "not_needed", f"{stage} packs by itself, or has nothing to pack")
    train_on_inputs = conversion.source.pop("train_on_inputs", None)
    if train_on_inputs is not None and train_on_inputs.value is not None and conversion.has("assistant_only_loss"):
        assistant_only, name = train_on_inputs.value is not True, "train_on_inputs"
        conversion.set(".assistant_only_loss", assistant_only, source_key=name, comment=name)
    elif train_on_inputs is not None:
        conversion.report("train_on_inputs", train_on_inputs, "not_needed", f"{stage} has no prompts to mask")


def _convert_trackers(conversion: Conversion) -> None:
    tracker_names = []
    for name, tracker in (("wandb_project", "wandb"), ("mlflow_tracking_uri", "mlflow"), ("use_wandb", "wandb")):
        node = conversion.pop(name)
        if node is not None:
            tracker_names.append(tracker)
            advice = f"report_to: {tracker} is written; set the rest in the environment"
            conversion.report(name, node, "approximated", advice)
    if tracker_names:
        convert_report_to(conversion, ["tensorboard", *dict.fromkeys(tracker_names)], None, "report_to")
    unsupported = ("use_comet", "comet_project_name", "swanlab_project", "use_swanlab")
    conversion.report_if_set(unsupported, "unsupported", "that tracker is not supported")


def _convert_data(conversion: Conversion) -> None:
    name = "pretraining_dataset" if "pretraining_dataset" in conversion.source else "datasets"
    datasets = conversion.pop(name)
    if datasets is None:
        return
    items = datasets.value if isinstance(datasets.value, list) else [datasets]
    convert_datasets(conversion, items, name, lambda item, label: _convert_entry(conversion, item, label))
    _convert_chat_template(conversion)
    _convert_held_out(conversion)


def _convert_entry(conversion: Conversion, item: ConfigNode, label: str) -> None:
    entry = dict(item.mapping) if isinstance(item.value, dict) else {"path": item}
    convert_dataset(conversion, entry, label)
    if conversion.spec.row_format == "text":
        column = entry.pop("text_column", None) or entry.pop("field", None)
        if column is not None:
            conversion.set("data.text_column", column, source_key=f"{label}.text_column")
        kind = entry.pop("type", None)
        conversion.converted += [f"{label}.type"] if kind is not None else []
    else:
        _convert_format(conversion, entry, label)
    _convert_entry_details(conversion, entry, label)


def _convert_format(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """Column roles, by the prompt format of the entry or by its own fields."""
    kind, is_chat = entry.pop("type", None), conversion.spec.row_format == "conversations"
    if kind is not None and isinstance(kind.value, dict):
        _convert_custom_format(conversion, kind, label)
        return
    format_name = "" if kind is None else str(kind.value)
    messages = entry.pop("field_messages", None)
    if format_name.startswith("chat_template") and not is_chat and "field_chosen" not in entry:
        conversion.converted.append(f"{label}.type")  # its columns chosen and rejected hold messages
        return
    if format_name.startswith(("chat_template", "sharegpt")) and is_chat:
        column = "conversations" if format_name.startswith("sharegpt") else "messages"
        column = column if messages is None else str(messages.value)
        if column != "messages":
            conversion.set("data.columns", {column: "messages"}, source_key=f"{label}.field_messages")
        conversion.converted.append(f"{label}.type")
        return
    preference_format = PREFERENCE_FORMATS.get(format_name.rpartition(".")[2])
    columns = PROMPT_FORMATS.get(format_name) if is_chat else preference_format
    fields = {key: entry.pop(key) for key in ("field_chosen", "field_rejected") if key in entry}
    if columns is None and fields:
        columns = {str(node.value): FIELD_ROLES[key] for key, node in fields.items()}
        conversion.converted += [f"{label}.{key}" for key in fields]
    if columns is not None:
        conversion.set("data.columns", columns, comment=f"type: {format_name}")
        conversion.report(f"{label}.type", kind, "approximated", OWN_TEMPLATE)
    elif kind is not None:
        advice = "set the roles of the columns: data.columns: {QUESTION: prompt, …}"
        conversion.report(f"{label}.type", kind, "unsupported", advice)
    if messages is not None:
        columns = {str(messages.value): "prompt", **(columns or {})}
        conversion.set("data.columns", columns, source_key=f"{label}.field_messages")


def _convert_custom_format(conversion: Conversion, kind: ConfigNode, label: str) -> None:
    columns = {}
    for name, node in kind.mapping.items():
        if name in FIELD_ROLES:
            columns[str(node.value)] = FIELD_ROLES[name]
            conversion.converted.append(f"{label}.type.{name}")
        elif name == "system_prompt" and node.value:
            conversion.set("data.system_prompt", node, source_key=f"{label}.type.system_prompt")
        elif node.value:
            conversion.report(f"{label}.type.{name}", node, "approximated", OWN_TEMPLATE)
    if columns:
        conversion.set("data.columns", columns)


def _convert_entry_details(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """The other settings of an entry: names of turn fields, and which turns are trained."""
    names = {"message_field_role": ("role", "from"), "message_field_content": ("content", "value")}
    mapping = entry.pop("message_property_mappings", None)
    mapped = {f"message_field_{key}": node for key, node in (mapping.mapping if mapping is not None else {}).items()}
    for name, node in {**entry, **mapped}.items():
        key = f"{label}.{name}"
        if name in names and str(node.value) in names[name]:
            conversion.converted.append(key)
        elif name in names:
            conversion.report(key, node, "unsupported", "a turn has role and content, or from and value")
        elif name == "roles_to_train" and conversion.has("assistant_only_loss"):
            roles = [str(item.value) for item in node.value] if isinstance(node.value, list) else []
            assistant_only = bool(roles) and set(roles) <= {"assistant", "gpt"}
            comment = f"roles_to_train: {', '.join(roles)}"
            conversion.set(".assistant_only_loss", assistant_only, source_key=key, comment=comment)
        elif name == "train_on_eos" and str(node.value) == "turn":
            conversion.report(key, node, "not_needed", "the end of each answer is trained")
        elif name in ("chat_template", "roles", "conversation"):
            conversion.report(key, node, "approximated", "the template and roles of the model are used")
        elif node.value is None or node.value is False:
            conversion.report(key, node, "not_needed", "")
        else:
            advice = "an entry of datasets has no such setting here; prepare the rows beforehand"
            conversion.report(key, node, "unsupported", advice)


def _convert_chat_template(conversion: Conversion) -> None:
    node = conversion.pop("chat_template")
    conversion.rename("chat_template_jinja", "model.chat_template")
    conversion.rename("chat_template_kwargs", "model.chat_template_kwargs")
    if node is not None and str(node.value).startswith("tokenizer_default"):
        conversion.report("chat_template", node, "not_needed", OWN_TEMPLATE)
    elif node is not None:
        conversion.report("chat_template", node, "approximated", f"{OWN_TEMPLATE}; model.chat_template sets another")
    conversion.rename("default_system_message", "data.system_prompt")


def _convert_held_out(conversion: Conversion) -> None:
    tests, test_size = conversion.pop("test_datasets"), conversion.source.pop("val_set_size", None)
    if tests is not None and isinstance(tests.value, list):
        path = tests.value[0].get(("data_files",)) or tests.value[0].get(("path",))
        if path is not None and isinstance(path.value, list):
            path = path.value[0]
        if path is not None and isinstance(path.value, str) and ("." in path.value.rpartition("/")[2]):
            conversion.set("data.validation_file", path, source_key="test_datasets[0].path")
        else:
            conversion.report("test_datasets", tests, "approximated", NO_TEST_SPLIT)
            conversion.set("data.test_size", "10%", comment="instead of test_datasets")
            return
    if conversion.get("data.validation_file") is not None and test_size is not None:
        conversion.report("val_set_size", test_size, "not_needed", "test_datasets are used")
        return
    convert_test_split(conversion, test_size, "val_set_size")
