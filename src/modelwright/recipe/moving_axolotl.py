"""Read a configuration of axolotl, as ``axolotl train`` takes it."""

from __future__ import annotations

from modelwright.recipe.moved import Move
from modelwright.recipe.moving_common import (
    held_out,
    intervals,
    low_rank,
    number,
    optimizer,
    others,
    rows,
    scheduler,
    sharing,
    trackers,
)
from modelwright.recipe.tree import Located

ATTENTION = {
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
COLUMNS = {
    "alpaca": {"instruction": "prompt", "input": "context", "output": "completion"},
    "alpaca_chat.load_qa": {"question": "prompt", "answer": "completion"},
    "alpaca_w_system.load_open_orca": {"system_prompt": "system", "question": "prompt", "response": "completion"},
    "gpteacher": {"instruction": "prompt", "input": "context", "response": "completion"},
    "oasst": {"INSTRUCTION": "prompt", "RESPONSE": "completion"},
    "summarizetldr": {"article": "prompt", "summary": "completion"},
    "context_qa": {"article": "context", "question": "prompt", "answer": "completion"},
}
"""What the columns of its named formats are."""
PAIRS = {
    "intel": {"question": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "prompt_pairs": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "ultra": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "icr": {"input": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "argilla": {"instruction": "prompt", "chosen_response": "chosen", "rejected_response": "rejected"},
}
"""The same for its formats of pairs, by what stands behind the dot: chatml.intel, llama3.intel."""
FIELDS = {
    "field_instruction": "prompt", "field_input": "context", "field_output": "completion", "field_system": "system",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip
OFFLOADED = ("offload", "unsloth")
"""What its words for activations that are kept elsewhere have in them."""
OWN_ATTENTION = "PyTorch's own attention is taken; attn_implementation: flash_attention_2 asks for another"
NO_TEMPLATE = "the model's own chat template is used in place of that format's"


def axolotl(move: Move) -> None:
    """Take what wants a rule of its own; names that both tools share are carried afterwards."""
    stage = move.stage
    intervals(move, number(move.source.get("num_epochs"), 1.0))
    _method(move)
    _model(move)
    _data(move)
    optimizer(move, "optimizer")
    scheduler(move, "lr_scheduler")
    sharing(move)
    _numbers(move)
    _trackers(move)
    micro = move.source.get("micro_batch_size")
    defaults = {
        "warmup_steps": "3%", "max_length": 512, "per_device_train_batch_size": 1, "load_best_model_at_end": False,
        "per_device_eval_batch_size": 1 if micro is None else micro.value,
    }  # fmt: skip
    for name, value in defaults.items():
        move.default(f"{stage}.{name}", value)


def _method(move: Move) -> None:
    wish = move.take("rl")
    if wish is not None:
        move.carried.append("rl")
        if str(wish.value).lower() == "ipo":
            move.put("dpo.loss_type", "ipo", remark="rl: ipo")
    beta = move.take("rl_beta") or move.take("dpo_beta")
    nested = move.take("trl")
    for name, node in (nested.entries if nested is not None else {}).items():
        if name == "beta" and beta is None and move.stage == "dpo":
            move.put("dpo.beta", node, came_from="trl.beta")
        else:
            move.leave(f"trl.{name}", node, "lost", "the settings of online methods have no place here")
    if beta is not None and move.stage == "dpo":
        move.put("dpo.beta", beta, came_from="rl_beta")


def _model(move: Move) -> None:
    adapter = move.take("adapter")
    kind = "" if adapter is None else str(adapter.value).lower()
    linear, targets = move.take("lora_target_linear"), move.take("lora_target_modules")
    wanted = kind in ("lora", "qlora")
    if adapter is not None and not wanted:
        move.leave(
            "adapter", adapter, "lost", "there is LoRA, with or without quantised weights; all weights move here"
        )
    move.carried += ["adapter"] if wanted else []
    low_rank(move, wanted)
    if linear is not None and wanted:
        move.put(f"{move.stage}.lora_target_modules", "all-linear", came_from="lora_target_linear")
    elif targets is not None and wanted:
        move.put(f"{move.stage}.lora_target_modules", targets, came_from="lora_target_modules")
    for name, node in (("lora_target_linear", linear), ("lora_target_modules", targets)):
        if node is not None and not wanted:
            move.leave(name, node, "unneeded", "no low-rank matrices are trained")
        elif node is not None and name not in move.carried:
            move.leave(name, node, "unneeded", "all linear layers are meant")
    for name, ours in ATTENTION.items():
        if move.take(name) is not None:
            move.put("model.attn_implementation", ours, came_from=name, remark=name)
    for name in ("flash_attention", "xformers_attention", "s2_attention", "sage_attention", "flash_optimum"):
        node = move.take(name)
        if node is not None:
            move.leave(
                name,
                node,
                "nearest",
                OWN_ATTENTION,
            )
    revision = move.take("revision_of_model")
    if revision is not None:
        move.put("model.revision", revision, came_from="revision_of_model")
    tokenizer = move.take("tokenizer_config")
    if tokenizer is not None:
        move.leave("tokenizer_config", tokenizer, "lost", "a model brings its own tokenizer")


def _numbers(move: Move) -> None:
    """Precision and the switches whose words differ."""
    stage = move.stage
    wide, half, eight = (move.take(name) for name in ("bfloat16", "float16", "fp8"))
    full = move.take("float32")
    for name, node, ours in (("bfloat16", wide, "bf16"), ("float16", half, "fp16"), ("float32", full, "fp32")):
        if node is not None and "bf16" not in move.source and "fp16" not in move.source:
            move.put(f"{stage}.precision", ours, came_from=name, remark=name)
        elif node is not None:
            move.leave(name, node, "unneeded", "bf16 or fp16 says what is computed in")
    if eight is not None:
        for name in ("bf16", "fp16"):
            node = move.source.pop(name, None)
            if node is not None:
                move.leave(name, node, "unneeded", "fp8 computes in fp8, the rest in bf16")
        move.put(f"{stage}.precision", "fp8", came_from="fp8")
    recompute = move.source.get("gradient_checkpointing")
    if recompute is not None and any(word in str(recompute.value).lower() for word in OFFLOADED):
        move.put(f"{stage}.gradient_checkpointing", True, remark=f"nearest to {recompute.value}")
        move.leave("gradient_checkpointing", recompute, "nearest", "activations are computed again, not offloaded")
        del move.source["gradient_checkpointing"]
    compiled = move.take("torch_compile")
    if compiled is not None:
        move.put(f"{stage}.torch_compile", True, came_from="torch_compile")
    total = move.take("batch_size")
    if total is not None:
        move.put(f"{stage}.global_batch_size", total, came_from="batch_size")
    floor = move.take("cosine_min_lr_ratio") or move.take("cosine_constant_lr_ratio")
    if floor is not None:
        move.leave("cosine_min_lr_ratio", floor, "lost", "a cosine falls to zero")
    packed = move.take("sample_packing")
    if packed is not None and stage == "sft":
        move.put("sft.packing", packed, came_from="sample_packing")
    elif packed is not None:
        move.leave("sample_packing", packed, "unneeded", f"{stage} packs by itself, or has nothing to pack")
    learnt = move.source.pop("train_on_inputs", None)
    if learnt is not None and learnt.value is not None and stage == "sft":
        move.put(
            "sft.assistant_only_loss", learnt.value is not True, came_from="train_on_inputs", remark="train_on_inputs"
        )
    elif learnt is not None:
        move.leave("train_on_inputs", learnt, "unneeded", f"{stage} has no prompts to leave out")


def _trackers(move: Move) -> None:
    wished = []
    for name, word in (("wandb_project", "wandb"), ("mlflow_tracking_uri", "mlflow"), ("use_wandb", "wandb")):
        node = move.take(name)
        if node is not None:
            wished.append(word)
            move.leave(name, node, "nearest", f"report_to: {word} is written; the environment says the rest")
    if wished:
        trackers(move, ["tensorboard", *dict.fromkeys(wished)], None, "report_to")
    for name in ("use_comet", "comet_project_name", "swanlab_project", "use_swanlab"):
        node = move.take(name)
        if node is not None:
            move.leave(name, node, "lost", "that tracker is not told")


def _data(move: Move) -> None:
    name = "pretraining_dataset" if "pretraining_dataset" in move.source else "datasets"
    sets = move.take(name)
    if sets is None:
        return
    items = sets.value if isinstance(sets.value, list) else [sets]
    first = items[0]
    entry = dict(first.entries) if isinstance(first.value, dict) else {"path": first}
    label = f"{name}[0]"
    rows(move, entry, label)
    if move.stage == "pretrain":
        column = entry.pop("text_column", None) or entry.pop("field", None)
        if column is not None:
            move.put("data.text_column", column, came_from=f"{label}.text_column")
        kind = entry.pop("type", None)
        move.carried += [f"{label}.type"] if kind is not None else []
    else:
        _format(move, entry, label)
    _details(move, entry, label)
    others(move, items[1:], name)
    _template(move)
    _held_out(move)


def _format(move: Move, entry: dict[str, Located], label: str) -> None:
    """What the columns are, by the format that the entry names or spells out."""
    kind = entry.pop("type", None)
    if kind is not None and isinstance(kind.value, dict):
        _spelt_out(move, kind, label)
        return
    word = "" if kind is None else str(kind.value)
    messages = entry.pop("field_messages", None)
    if word.startswith(("chat_template", "sharegpt")) and move.stage == "sft":
        column = "conversations" if word.startswith("sharegpt") else "messages"
        column = column if messages is None else str(messages.value)
        if column != "messages":
            move.put("data.columns", {column: "messages"}, came_from=f"{label}.field_messages")
        move.carried.append(f"{label}.type")
        return
    columns = COLUMNS.get(word) if move.stage == "sft" else PAIRS.get(word.rpartition(".")[2])
    fields = {key: entry.pop(key) for key in ("field_chosen", "field_rejected") if key in entry}
    if columns is None and fields:
        columns = {str(node.value): FIELDS[key] for key, node in fields.items()}
        move.carried += [f"{label}.{key}" for key in fields]
    if columns is not None:
        move.put("data.columns", columns, remark=f"type: {word}")
        move.leave(f"{label}.type", kind, "nearest", NO_TEMPLATE)
    elif kind is not None:
        move.leave(f"{label}.type", kind, "lost", "say which column is which: data.columns: {QUESTION: prompt, …}")
    if messages is not None:
        move.put(
            "data.columns", {str(messages.value): "prompt", **(columns or {})}, came_from=f"{label}.field_messages"
        )


def _spelt_out(move: Move, kind: Located, label: str) -> None:
    columns = {}
    for name, node in kind.entries.items():
        if name in FIELDS:
            columns[str(node.value)] = FIELDS[name]
            move.carried.append(f"{label}.type.{name}")
        elif name == "system_prompt" and node.value:
            move.put("data.system_prompt", node, came_from=f"{label}.type.system_prompt")
        elif node.value:
            move.leave(f"{label}.type.{name}", node, "nearest", NO_TEMPLATE)
    if columns:
        move.put("data.columns", columns)


def _details(move: Move, entry: dict[str, Located], label: str) -> None:
    """What else an entry says: which turns are learnt, and how they are called."""
    names = {"message_field_role": ("role", "from"), "message_field_content": ("content", "value")}
    mapping = entry.pop("message_property_mappings", None)
    said = {f"message_field_{key}": node for key, node in (mapping.entries if mapping is not None else {}).items()}
    for name, node in {**entry, **said}.items():
        key = f"{label}.{name}"
        if name in names and str(node.value) in names[name]:
            move.carried.append(key)
        elif name in names:
            move.leave(key, node, "lost", "a turn has role and content, or from and value")
        elif name == "roles_to_train" and move.stage == "sft":
            words = [str(item.value) for item in node.value] if isinstance(node.value, list) else []
            alone = bool(words) and set(words) <= {"assistant", "gpt"}
            move.put("sft.assistant_only_loss", alone, came_from=key, remark=f"roles_to_train: {', '.join(words)}")
        elif name == "train_on_eos" and str(node.value) == "turn":
            move.leave(key, node, "unneeded", "the end of each answer is learnt")
        elif name in ("chat_template", "roles", "conversation"):
            move.leave(key, node, "nearest", "the model's own template and roles are used")
        elif node.value is None or node.value is False:
            move.leave(key, node, "unneeded", "")
        else:
            move.leave(key, node, "lost", "an entry of datasets has no such word here; make the rows so beforehand")


def _template(move: Move) -> None:
    node = move.take("chat_template")
    if node is not None and str(node.value).startswith("tokenizer_default"):
        move.leave("chat_template", node, "unneeded", "the model's own template is used")
    elif node is not None:
        move.leave("chat_template", node, "nearest", "the model's own template is used; change it in its folder")
    system = move.take("default_system_message")
    if system is not None:
        move.put("data.system_prompt", system, came_from="default_system_message")


def _held_out(move: Move) -> None:
    tests, share = move.take("test_datasets"), move.source.pop("val_set_size", None)
    if tests is not None and isinstance(tests.value, list):
        path = tests.value[0].at(("data_files",)) or tests.value[0].at(("path",))
        if path is not None and isinstance(path.value, list):
            path = path.value[0]
        if path is not None and isinstance(path.value, str) and ("." in path.value.rpartition("/")[2]):
            move.put("data.validation_file", path, came_from="test_datasets[0].path")
        else:
            advice = "a split of a set is not measured; 10% of the questions are held out, or name data.validation_file"
            move.leave("test_datasets", tests, "nearest", advice)
            move.put("data.test_size", "10%", remark="in place of test_datasets")
            return
    if move.at("data.validation_file") is not None and share is not None:
        move.leave("val_set_size", share, "unneeded", "test_datasets measure")
        return
    held_out(move, share, "val_set_size")
