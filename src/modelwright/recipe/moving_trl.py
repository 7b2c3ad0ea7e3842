"""Read a configuration of TRL's command line, as ``trl sft --config`` and ``trl dpo --config`` take it."""

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
    words_of,
)

DTYPES = {"float32": "fp32", "auto": "auto"}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention", "auto")
OF_AN_ENTRY = {
    "columns": "columns that play no part are not read",
    "fraction": "data.max_rows takes the first rows",
    "data_dir": "name the folder itself: data.dataset_name: FOLDER",
}
LOSSES = ("sigmoid", "ipo", "hinge")


def trl(move: Move) -> None:
    """Take what wants a rule of its own; names that both tools share are carried afterwards."""
    stage = move.stage
    intervals(move, number(move.source.get("num_train_epochs"), 3.0))
    _model(move)
    _data(move)
    optimizer(move, "optim")
    scheduler(move, "lr_scheduler_type")
    sharing(move)
    _loss(move)
    wish = move.take("report_to")
    trackers(move, words_of(wish), wish, "report_to")
    tokens = move.source.get("max_length")
    if tokens is not None and tokens.value is None:
        move.leave("max_length", move.source.pop("max_length"), "nearest", "every row has a longest; 1024 is written")
    defaults = {
        "max_length": 1024, "num_train_epochs": 3, "lr_scheduler_type": "linear", "gradient_checkpointing": True,
        "load_best_model_at_end": False,
    }  # fmt: skip
    for name, value in defaults.items():
        move.default(f"{stage}.{name}", value)


def _model(move: Move) -> None:
    peft = move.take("use_peft")
    targets = move.take("lora_target_modules")
    if peft is not None:
        move.default(f"{move.stage}.lora_dropout", 0.05)
    low_rank(move, peft is not None)
    move.carried += ["use_peft"] if peft is not None else []
    if peft is not None and targets is not None:
        move.put(f"{move.stage}.lora_target_modules", targets, came_from="lora_target_modules")
    elif peft is not None:
        advice = "left to peft, which takes two projections of attention in most families; all-linear stands here"
        move.leave("lora_target_modules", None, "nearest", advice)
    elif targets is not None:
        move.leave("lora_target_modules", targets, "unneeded", "no low-rank matrices are trained")
    for name in ("dtype", "torch_dtype"):
        node = move.take(name)
        if node is not None and str(node.value) in DTYPES:
            move.put(f"{move.stage}.weights", DTYPES[str(node.value)], came_from=name, remark=f"{name}: {node.value}")
        elif node is not None:
            advice = "weights: auto is written: on a GPU bf16 with exact masters beside them"
            move.put(f"{move.stage}.weights", "auto", remark=f"nearest to {node.value}")
            move.leave(name, node, "nearest", advice)
    attention = move.take("attn_implementation")
    word = "" if attention is None else str(attention.value)
    if word in ATTENTION:
        move.put("model.attn_implementation", word, came_from="attn_implementation")
    elif attention is not None:
        move.put("model.attn_implementation", "auto", remark=f"nearest to {word}")
        move.leave(
            "attn_implementation", attention, "nearest", "PyTorch's own attention is taken; no code of the hub runs"
        )
    revision = move.take("model_revision")
    if revision is not None and str(revision.value) != "main":
        move.put("model.revision", revision, came_from="model_revision")
    elif revision is not None:
        move.carried.append("model_revision")


def _data(move: Move) -> None:
    mixture = move.take("datasets")
    if mixture is not None and isinstance(mixture.value, list):
        entry = dict(mixture.value[0].entries)
        rows(move, entry, "datasets[0]")
        for name, node in entry.items():
            known = name in OF_AN_ENTRY
            advice = OF_AN_ENTRY.get(name, "an entry of datasets has no such word here")
            move.leave(f"datasets[0].{name}", node, "nearest" if known else "lost", advice)
        others(move, mixture.value[1:], "datasets")
    column = move.take("dataset_text_field")
    if column is not None and move.stage == "pretrain":
        move.put("data.text_column", column, came_from="dataset_text_field")
        advice = "raw text is learnt by pretrain: documents joined end to end, cut into rows of max_length, kept apart"
        move.leave("dataset_text_field", column, "nearest", advice)
    elif column is not None:
        move.leave("dataset_text_field", column, "lost", "conversations have prompts and answers: data.columns")
    test, share = move.take("dataset_test_split"), move.take("test_split_size")
    if "eval_strategy" in move.carried and share is None and move.at("data.validation_file") is None:
        advice = "a split of a set is not measured; 10% of the questions are held out, or name data.validation_file"
        move.leave("dataset_test_split", test, "nearest", advice)
        move.put("data.test_size", "10%", remark="in place of a test split")
        return
    if test is not None:
        move.leave("dataset_test_split", test, "unneeded", "without an eval_strategy it is not read")
    held_out(move, share, "test_split_size")


def _loss(move: Move) -> None:
    kind = move.take("loss_type")
    words = words_of(kind)
    if move.stage == "dpo" and words:
        known = [word for word in words if word in LOSSES]
        if known == words[:1] and len(words) == 1:
            move.put("dpo.loss_type", known[0], came_from="loss_type")
        else:
            first = known[0] if known else "sigmoid"
            move.put("dpo.loss_type", first, remark=f"nearest to {', '.join(words)}")
            move.leave("loss_type", kind, "nearest", f"one of {', '.join(LOSSES)}; {first} is written")
    elif words in (["nll"], ["chunked_nll"]):
        move.leave(
            "loss_type", kind, "unneeded", "the loss is the mean over trained tokens, and never holds all logits"
        )
    elif kind is not None:
        move.leave("loss_type", kind, "lost", "the loss of sft is the mean negative log-likelihood")
    dropout = move.source.pop("disable_dropout", None)
    if dropout is not None and dropout.value is False:
        move.leave("disable_dropout", dropout, "nearest", "dropout is what the model's config says")
    elif dropout is not None:
        move.leave("disable_dropout", dropout, "unneeded", "dropout is what the model's config says; most have none")
    _packing(move)
    only, whole = move.take("assistant_only_loss"), move.source.pop("completion_only_loss", None)
    if move.stage != "sft":
        for name, node in (("assistant_only_loss", only), ("completion_only_loss", whole)):
            if node is not None:
                move.leave(name, node, "unneeded", f"{move.stage} has no prompts to leave out")
    elif only is not None or (whole is not None and whole.value is not None):
        learnt = only is not None or (whole is not None and whole.value is True)
        move.put("sft.assistant_only_loss", learnt, came_from="assistant_only_loss" if only else "completion_only_loss")
    else:
        advice = "TRL learns whole conversations of messages unless told; the assistant's words alone are learnt here"
        move.leave("assistant_only_loss", None, "nearest", advice)


def _packing(move: Move) -> None:
    cut, strategy, packing = (move.take(name) for name in ("truncation_mode", "packing_strategy", "packing"))
    if cut is not None and str(cut.value) != "keep_start":
        move.leave("truncation_mode", cut, "lost", "the end of what is too long is cut, and counted")
    elif cut is not None:
        move.carried.append("truncation_mode")
    if strategy is not None and move.stage == "pretrain":
        move.leave("packing_strategy", strategy, "unneeded", "documents are joined end to end")
    elif strategy is not None and packing is not None:
        advice = "rows are put together by best fit; what is longer than max_length is cut"
        move.leave("packing_strategy", strategy, "nearest" if str(strategy.value) != "bfd" else "unneeded", advice)
    elif strategy is not None:
        move.leave("packing_strategy", strategy, "unneeded", "nothing is packed")
    if packing is not None and move.stage == "sft":
        move.put("sft.packing", packing, came_from="packing")
    elif packing is not None:
        move.leave("packing", packing, "unneeded", f"{move.stage} packs by itself, or has nothing to pack")
