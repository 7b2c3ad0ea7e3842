"""What TRL and axolotl have in common: optimizer, schedule, intervals, low-rank matrices, sources of rows."""

from __future__ import annotations

from pathlib import PurePath
from typing import get_args

from modelwright.recipe.moved import Move, located
from modelwright.recipe.training import Scheduler
from modelwright.recipe.tree import Located

SCHEDULERS = {**{name: name for name in get_args(Scheduler)}, "wsd": "warmup_stable_decay"}
NEAREST_SCHEDULER = {
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "rex"), "cosine"),
    **dict.fromkeys(("polynomial", "inverse_sqrt", "reduce_lr_on_plateau"), "linear"),
}
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
BUILDERS = ("json", "csv", "parquet", "text")
FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def optimizer(move: Move, name: str) -> None:
    """AdamW in any of its implementations, or SGD; others become AdamW."""
    node = move.take(name)
    if node is None:
        return
    word = str(node.value).lower()
    if word in ADAMW:
        move.put(f"{move.stage}.optim", "adamw_torch", came_from=name, remark=f"{name}: {word}")
    elif word == "sgd":
        move.put(f"{move.stage}.optim", "sgd", came_from=name)
        move.put(f"{move.stage}.momentum", 0, remark="the other tool's sgd has none")
    else:
        low = "; exp_avg_dtype: bf16 saves memory" if "8bit" in word or "4bit" in word else ""
        move.put(f"{move.stage}.optim", "adamw_torch", remark=f"nearest to {word}")
        move.leave(name, node, "nearest", f"there are AdamW and SGD; adamw_torch is written{low}")


def scheduler(move: Move, name: str) -> None:
    """The shape of the learning rate, or the nearest one."""
    node, more = move.take(name), move.take("lr_scheduler_kwargs")
    word = "" if node is None else str(node.value).lower()
    if word in SCHEDULERS:
        move.put(f"{move.stage}.lr_scheduler_type", SCHEDULERS[word], came_from=name)
    elif node is not None:
        close = NEAREST_SCHEDULER.get(word, "cosine")
        move.put(f"{move.stage}.lr_scheduler_type", close, remark=f"nearest to {word}")
        move.leave(name, node, "nearest", f"not offered; {close} is written")
    for key, value in (more.entries if more is not None else {}).items():
        if key == "num_decay_steps" and SCHEDULERS.get(word) == "warmup_stable_decay":
            move.put(f"{move.stage}.decay_steps", value, came_from=f"lr_scheduler_kwargs.{key}")
        else:
            move.leave(f"lr_scheduler_kwargs.{key}", value, "lost", "a schedule has no such number here")


def intervals(move: Move, epochs: float) -> None:
    """When held-out loss is measured and checkpoints are written: by steps, by epochs, so many an epoch, or never."""
    for what, key in (("eval", "eval_steps"), ("save", "save_steps")):
        strategy, several = move.take(f"{what}_strategy"), move.take(f"{what}s_per_epoch")
        strategy = strategy or (move.take("evaluation_strategy") if what == "eval" else None)
        word = "" if strategy is None else str(strategy.value).lower()
        times = float(str(several.value)) if several is not None else 1.0 if word == "epoch" else 0.0
        if times:
            came = f"{what}s_per_epoch" if several is not None else f"{what}_strategy"
            reason = f"{times:g} an epoch × {epochs:g} epochs"
            move.put(f"{move.stage}.{key}", f"{100 / (times * epochs):.4g}%", came_from=came, remark=reason)
            if "max_steps" in move.source:
                move.leave(came, several or strategy, "nearest", "a share of max_steps is written")
        if strategy is not None and not (times and several is None):
            if word == "no":
                advice = "checkpoints are always written; save_steps says how often" if what == "save" else ""
                move.leave(f"{what}_strategy", strategy, "lost" if advice else "unneeded", advice)
            elif word == "best":
                move.leave("save_strategy", strategy, "nearest", "the best checkpoint is always kept")
            else:
                move.carried.append(f"{what}_strategy")
    limit = move.take("save_total_limit")
    if limit is not None and str(limit.value).isdigit() and int(str(limit.value)) < 2:
        move.put(f"{move.stage}.save_total_limit", 2, remark="at least 2, so that a damaged one has one behind it")
        move.leave("save_total_limit", limit, "nearest", "2 is the least: a damaged checkpoint wants one behind it")
    elif limit is not None:
        move.put(f"{move.stage}.save_total_limit", limit, came_from="save_total_limit")
    metric = move.take("metric_for_best_model")
    if metric is not None and str(metric.value) in ("loss", "eval_loss"):
        move.put(f"{move.stage}.metric_for_best_model", "eval_loss", came_from="metric_for_best_model")
    elif metric is not None:
        move.leave("metric_for_best_model", metric, "nearest", "eval_loss decides")
    often = move.take("logging_steps")
    if often is not None and isinstance(often.value, float) and often.value < 1:
        move.leave("logging_steps", often, "nearest", "a count of steps here; every step is written down")
    elif often is not None:
        move.put(f"{move.stage}.logging_steps", often, came_from="logging_steps")


def low_rank(move: Move, wanted: bool) -> None:
    """The settings of low-rank matrices; where none are trained they would be refused, and are left."""
    names = {"lora_r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    names |= {"use_dora": "use_dora", "use_rslora": "use_rslora"}
    names |= {"peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora"}
    for name, ours in names.items():
        node = move.source.pop(name, None) if name == "lora_dropout" else move.take(name)
        if node is not None and wanted and node.value is not None:
            move.put(f"{move.stage}.{ours}", node, came_from=name)
        elif node is not None:
            move.leave(name, node, "unneeded", "no low-rank matrices are trained")
    bits = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    for name, quantization in bits.items():
        node = move.take(name)
        if node is not None and wanted:
            move.put(f"{move.stage}.quantization", quantization, came_from=name, remark=name)
        elif node is not None:
            move.leave(name, node, "lost", "quantised weights are only kept beside low-rank matrices")
    kind = move.take("bnb_4bit_quant_type")
    if kind is not None and str(kind.value) != "nf4":
        move.leave("bnb_4bit_quant_type", kind, "nearest", "nf4 is the only form in 4 bits")
    elif kind is not None:
        move.carried.append("bnb_4bit_quant_type")
    if wanted:
        move.put(f"{move.stage}.trainable", "lora")


def sharing(move: Move) -> None:
    """DeepSpeed and FSDP become sharding: fsdp; what they say in detail is left."""
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        node = move.take(name)
        if node is None:
            continue
        copies = name == "deepspeed" and any(word in str(node.value).lower() for word in ("zero1", "zero2"))
        move.put(f"{move.stage}.sharding", "ddp" if copies else "fsdp", remark=f"nearest to {name}")
        reason = "ddp is written: each device holds the optimizer whole" if copies else "sharding: fsdp is written"
        more = "; wrapping, prefetching and offloading have no settings here" if name != "fsdp" else ""
        move.leave(name, node, "nearest", reason + more)


def trackers(move: Move, wished: list[str], node: Located | None, name: str) -> None:
    """Who is told the numbers."""
    known = [word for word in wished if word in TRACKERS]
    lost = [word for word in wished if word not in TRACKERS and word not in ("none", "all")]
    if known or wished == ["none"]:
        move.put("report_to", known, came_from=name)
    if lost or wished == ["all"]:
        move.leave(name, node, "lost", f"the trackers are {', '.join(TRACKERS)}")


def rows(move: Move, entry: dict[str, Located], label: str) -> None:
    """Where the rows of one entry of datasets come from; what was taken is taken out of the entry."""
    path, files = entry.pop("path", None), entry.pop("data_files", None)
    kind = entry.pop("ds_type", None)
    named = "" if path is None else str(path.value)
    if files is not None and (named in BUILDERS or not named):
        _files(move, files, f"{label}.data_files")
        move.carried += [f"{label}.path"] if path is not None else []
    elif path is not None:
        is_file = PurePath(named).suffix in FILES
        move.put("data.train_file" if is_file else "data.dataset_name", path, came_from=f"{label}.path")
        if files is not None:
            advice = "which files of a set are read cannot be said; put them into data.train_file"
            move.leave(f"{label}.data_files", files, "lost", advice)
    if kind is not None:
        move.leave(f"{label}.ds_type", kind, "unneeded", "a file says by its suffix what it is")
    for name, ours in (("name", "dataset_config_name"), ("split", "dataset_split")):
        node = entry.pop(name, None)
        if node is not None and node.value is not None and move.at("data.dataset_name") is not None:
            move.put(f"data.{ours}", node, came_from=f"{label}.{name}")
        elif node is not None:
            move.leave(f"{label}.{name}", node, "unneeded", "a file has one part, and all of it is read")


def others(move: Move, items: list[Located], label: str) -> None:
    """Sets beyond the first: a stage learns from one."""
    wish = "data.mix with a section prepare takes several" if move.stage == "pretrain" else "join them into one file"
    for number, item in enumerate(items, 1):
        name = item.at(("path",)) or item
        move.leave(f"{label}[{number}]", name, "lost", f"a stage learns from one source; {wish}")


def _files(move: Move, files: Located, label: str) -> None:
    if isinstance(files.value, dict):
        for part, node in files.value.items():
            key = "data.train_file" if part == "train" else "data.validation_file"
            move.put(key, node, came_from=f"{label}.{part}")
        return
    items = files.value if isinstance(files.value, list) else [files]
    move.put("data.train_file", items[0], came_from=label)
    for item in items[1:]:
        move.leave(label, item, "lost", "a stage reads one file, or all files of a folder: data.dataset_name: FOLDER")


def words_of(node: Located | None) -> list[str]:
    """One word or several, as a list."""
    if node is None:
        return []
    return [str(item.value) for item in (node.value if isinstance(node.value, list) else [node])]


def number(node: Located | None, otherwise: float) -> float:
    """A number that was read, or another where there is none."""
    return float(node.value) if node is not None and isinstance(node.value, int | float) else otherwise


def held_out(move: Move, share: Located | None, name: str) -> None:
    """How much is held out: as the file says, else nothing, as the other tool does."""
    if share is not None:
        move.put("data.test_size", share, came_from=name)
    elif move.at("data.validation_file") is None:
        remark = f"{move.tool} holds nothing out unless asked; 10% would be measured"
        move.put("data.test_size", located(0, move.tree.origin), remark=remark)
