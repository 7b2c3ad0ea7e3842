"""Arguments and options that several commands share, their older spellings, and how results are printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from modelwright.errors import Problem, replace_surrogates
from modelwright.report.formatting import strip_control_chars

if TYPE_CHECKING:
    from modelwright.recipe.load import LoadedRecipe

StringList = list[str] | None
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
]
DataArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, or data: a file, a folder, a data set.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/.")]
SetOption = Annotated[StringList, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
AllowChangedOption = Annotated[
    StringList, typer.Option("--allow-changed", metavar="KEY", help="Resume although this setting changed.")
]
FromStageOption = Annotated[
    str | None,
    typer.Option("--from-stage", metavar="STAGE", help="First stage to run; earlier stages must be finished."),
]
UntilStageOption = Annotated[str | None, typer.Option("--until-stage", metavar="STAGE", help="Last stage to run.")]
AcceptGateOption = Annotated[
    StringList, typer.Option("--accept-gate", metavar="STAGE", help="Continue although its gate is closed.")
]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why, for --accept-gate; recorded in the run.")]
TrustFileOption = Annotated[
    StringList, typer.Option("--trust-file", metavar="FILE", help="Run this Python file, a verifier of the recipe.")
]
Fp8Option = Annotated[bool | None, typer.Option("--fp8/--no-fp8", help="Compute in fp8 without a trial, or in bf16.")]
LogFormatOption = Annotated[
    str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
]
NodeRankOption = Annotated[int | None, typer.Option("--node-rank", help="Several nodes: rank of this node, from 0.")]
MasterAddrOption = Annotated[
    str | None, typer.Option("--master-addr", help="Several nodes: address at which the others reach node 0.")
]
MasterPortOption = Annotated[
    int | None, typer.Option("--master-port", help="Several nodes: a free port of node 0; default: 29500.")
]
JobKindOption = Annotated[
    str | None, typer.Option("--job-kind", help="trainjob or pytorchjob; default: as in the recipe.")
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")
]

OLD_SPELLINGS = {
    "--clone-from": "--git-repo",
    "--count": "--num-samples",
    "--disturb": "--inject-fault",
    "--from": "--from-stage",
    "--full-question": "--prompt-template",
    "--into": "--output",
    "--key": "--api-key",
    "--kind": "--outtype",
    "--machine_rank": "--node-rank",
    "--main-address": "--master-addr",
    "--main_process_ip": "--master-addr",
    "--main_process_port": "--master-port",
    "--max-bad-share": "--max-invalid-fraction",
    "--nodes": "--nnodes",
    "--num_machines": "--nnodes",
    "--on": "--gpus",
    "--override": "--allow-changed",
    "--per-node": "--nproc-per-node",
    "--place": "--work-dir",
    "--port": "--master-port",
    "--rehearse": "--simulate",
    "--target": "--job-kind",
    "--to": "--output",
    "--until": "--until-stage",
}
"""Options of version 0.1 and of accelerate, and ours; each is accepted where a command has ours and not the other."""


SETTING_FLAGS = {
    "model_name_or_path", "use_flash_attention", "dataset_name", "dataset_config_name", "train_file", "validation_file",
    "text_column", "max_seq_length", "output_dir", "num_train_epochs", "per_device_train_batch_size",
    "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "warmup_steps",
    "bf16", "fp16", "gradient_checkpointing", "logging_steps", "save_steps", "eval_steps", "save_total_limit",
    "report_to", "resume_from_checkpoint", "seed",
}  # fmt: skip
"""Flags of the usual Transformers script, which commands with --set accept as they are."""
SWITCHES = {"bf16", "fp16", "gradient_checkpointing", "use_flash_attention"}
"""Those of them that need no value."""


def settings_from_flags(args: list[str]) -> list[str]:
    """Arguments with each of `SETTING_FLAGS` written as --set; a train_file replaces the recipe's data set."""
    rewritten: list[str] = []
    settings: dict[str, str] = {}
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in SETTING_FLAGS:
            rewritten.append(arg)
            continue
        takes_next = remaining and (name not in SWITCHES or remaining[0] in ("true", "false"))
        settings[name] = value if equals else remaining.pop(0) if takes_next else "true"
    if "train_file" in settings:
        settings = {"dataset_name": "null", "dataset_config_name": "null", **settings}
    return [*rewritten, *(part for name, value in settings.items() for part in ("--set", f"{name}={value}"))]


ARGUMENT_HINTS = {
    "RECIPE": "a recipe file or a name that modelwright recipes lists, such as quickstart",
    "RUN": "a run folder, such as runs/quickstart",
}
OTHER_OPTIONS = {
    **dict.fromkeys(("--config", "--recipe", "--config_file", "--config-file", "--yaml"), "RECIPE, the first argument"),
    **dict.fromkeys(("--model", "--model-name", "--base-model"), "--set model_name_or_path=NAME"),
    **dict.fromkeys(("--data", "--dataset", "--data-path"), "--set dataset_name=NAME"),
    **dict.fromkeys(("--epochs", "--num-epochs"), "--set num_train_epochs=N"),
    **dict.fromkeys(("--batch-size", "--batch_size", "--bs"), "--set per_device_train_batch_size=N"),
    **dict.fromkeys(("--gpus", "--num-gpus", "--num_gpus", "--nproc_per_node"), "launch RECIPE --nproc-per-node N"),
    "--num_processes": "--nproc-per-node N, the processes of one node",
}
"""Options of other tools, and what does the same here."""


def option_hint(name: str, options: set[str]) -> str:
    """What an unknown option was probably meant to be."""
    from modelwright.recipe.diagnostics import closest_match

    if hint := OTHER_OPTIONS.get(name):
        return f"did you mean {hint}?"
    if "--set" in options:
        from modelwright.errors import UsageError
        from modelwright.recipe.explain import resolve_key

        options = options | {"--output"}
        with suppress(UsageError):
            key = resolve_key(name.lstrip("-").replace("-", "_"))
            return f"it is a setting: --set {key.rpartition('.')[2]}=VALUE"
    close = closest_match(name, [option for option in options if option.startswith("--")], cutoff=0.7)
    return f"did you mean {close}?" if close else "--help lists the options"


class AliasCommand(TyperCommand):
    """A command that accepts `OLD_SPELLINGS` and `SETTING_FLAGS` without showing them in --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace old spellings, then parse."""
        args = [arg for arg in args if arg != "--" or self.name != "launch"]  # 0.1: launch RECIPE -- OPTIONS-OF-RUN
        options = {name for parameter in self.params for name in parameter.opts}
        end = args.index("--") if "--" in args else len(args)
        for index, arg in enumerate(args[:end]):
            old, equals, value = arg.partition("=")
            # torchrun takes --nproc_per_node too
            if old not in options and (new := OLD_SPELLINGS.get(old, old.replace("_", "-"))) in options:
                args[index] = f"{new}{equals}{value}"
        if "--set" in options:
            args = [*settings_from_flags(_expand_output(args[:end], options)), *args[end:]]
        self._check_options(args, options)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ != "MissingParameter":  # of click, which newer releases of typer contain
                raise
            from modelwright.errors import UsageError

            param = getattr(error, "param", None)
            wanted = str(param.metavar or param.opts[0].upper()) if param else "an argument"
            hint = ARGUMENT_HINTS.get(wanted, f"modelwright {self.name} --help shows how it is called")
            raise UsageError(f"{self.name} wants {wanted}: {hint}") from None

    def _check_options(self, args: list[str], options: set[str]) -> None:
        """Refuse an unknown long option with the one that was probably meant."""
        valued = {name for each in self.params if not getattr(each, "is_flag", False) for name in each.opts}
        known = options | {name for each in self.params for name in each.secondary_opts} | {"--help", "-h"}
        for previous, arg in zip(["", *args], args, strict=False):
            name = arg.partition("=")[0]
            if arg == "--":
                return
            if re.fullmatch(r"--[A-Za-z][\w-]*", name) and name not in known and previous not in valued:
                from modelwright.errors import UsageError

                raise UsageError(f"{self.name} has no option {name[:60]}; {option_hint(name, known)}")


def _expand_output(args: list[str], options: set[str]) -> list[str]:
    """Arguments with --output FOLDER as --set output_dir=FOLDER, for commands that take a recipe and write a run."""
    if "--output" in options:
        return args
    args = [re.sub(r"^(--output|-o)=", "--output_dir=", arg) for arg in args]
    return ["--output_dir" if arg in ("--output", "-o") else arg for arg in args]


def add_commands(app: typer.Typer, commands: dict[str, Callable[..., Any]], hidden: bool = False) -> None:
    """Add functions as commands, by name."""
    for name, function in commands.items():
        app.command(name, cls=AliasCommand, hidden=hidden)(function)


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    typer.echo(replace_surrogates(json.dumps(value, indent=2, ensure_ascii=False)))


def print_notes(loaded: LoadedRecipe) -> None:
    """Print what loading a recipe noticed on stderr."""
    for note in loaded.notes:
        print(strip_control_chars(note), file=sys.stderr)


def find_template_problems(loaded: LoadedRecipe, stage: str, rows: Sequence[Any]) -> list[Problem]:
    """Why the model's chat template does not render some of these rows; torch is loaded only if there are any."""
    if not rows:
        return []
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    from modelwright.stages import specs

    return specs.find_template_problems(loaded, stage, rows)
