"""Nothing that was read can act: no pickles, no eval, no foreign code; and the environment has few doors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "modelwright"
FILES = sorted(PACKAGE.rglob("*.py"))
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
CALLS = {
    *("torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load", "eval", "exec", "compile"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "subprocess.getoutput"),
    *("dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list"),
    *("dist.send_object_list", "dist.recv_object_list"),  # these send pickles between ranks
}
MAY_WRITE = {"models/save.py": {"torch.save", "torch.load weights_only"}}
"""Those who asked for .pth get it from here; it is read back with weights_only, which runs nothing."""
TRUSTING = {"trust_remote_code", "allow_pickle", "shell"}
READ_THE_ENVIRONMENT = {
    *("runs/caches.py", "engine/distributed.py", "recipe/load.py", "stages/pipeline.py", "cluster/progress.py"),
    "report/console.py",  # whether this is the rank that prints
    # these pass it on to other processes; the agent also sets a variable for torch's rendezvous
    *("launch/config.py", "launch/agent.py", "launch/supervisor.py", "launch/doctor.py", "launch/preflight.py"),
    "launch/torchrun.py",
}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def dotted(node: ast.AST) -> str:
    """A name as it is written: ``torch.load``; what is no name is a question mark, as in ``load_model().eval``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dangers(text: str) -> list[str]:
    """What could run code that came with data, with its line."""
    uses: list[str] = []
    tree = ast.parse(text)
    other = {name.asname: name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [f"{node.lineno}: {name.name}" for name in node.names if name.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
            uses += [f"{node.lineno}: {name}" for name in names if name.split(".")[0] in PICKLERS or name in CALLS]
        elif isinstance(node, ast.Call):
            first, _, rest = dotted(node.func).partition(".")
            called = f"{other.get(first, first)}.{rest}" if rest else first
            safe = any(word.arg == "weights_only" and getattr(word.value, "value", 0) is True for word in node.keywords)
            if called in CALLS:
                uses.append(f"{node.lineno}: {called}{' weights_only' if called == 'torch.load' and safe else ''}")
            uses += [f"{node.lineno}: {word.arg}" for word in node.keywords if trusts(word)]
    return uses


def trusts(word: ast.keyword) -> bool:
    """Whether an argument lets what is read run code; one that is decided elsewhere counts."""
    value = word.value.value if isinstance(word.value, ast.Constant) else "decided elsewhere"
    return (word.arg in TRUSTING and value is not False) or (word.arg == "typ" and value == "unsafe")


def environment_uses(text: str) -> list[int]:
    """Lines that read or write an environment variable."""
    names = {"os.environ", "os.getenv", "os.putenv", "environ", "getenv"}
    return sorted({node.lineno for node in ast.walk(ast.parse(text))
                   if isinstance(node, ast.Attribute | ast.Name) and dotted(node) in names
                   and not isinstance(node.ctx, ast.Store)})  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_that_is_read_can_act(file: Path) -> None:
    allowed = MAY_WRITE.get(name_of(file), set())
    uses = [line for line in dangers(file.read_text(encoding="utf-8")) if line.split(": ")[1] not in allowed]
    assert not uses, "\n".join(f"{name_of(file)}:{line}" for line in uses)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_environment_is_read_in_few_files(file: Path) -> None:
    if name_of(file) in READ_THE_ENVIRONMENT:
        return
    lines = environment_uses(file.read_text(encoding="utf-8"))
    assert not lines, f"{name_of(file)}:{lines[0]} reads the environment; hand the value down instead"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import shelve",
        "import marshal as m",
        "from os import system",
        "import torch as t\nt.load('x')",
        "import numpy as n\nn.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=setting)",
        "np.load('x', allow_pickle=True)",
        "subprocess.run('x', shell=True)",
        "yaml.load(text)",
        "exec('1')",
        "tokenizers.load('x', trust_remote_code=True)",
        "from joblib import load",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=setting)",
        "YAML(typ='unsafe')",
        "dist.broadcast_object_list([1])",
    ],
)
def test_a_danger_is_noticed(text: str) -> None:
    assert dangers(text)


@pytest.mark.parametrize("text", ["import os\nos.environ['X']", "import os\nos.getenv('X')"])
def test_a_read_of_the_environment_is_noticed(text: str) -> None:
    assert environment_uses(text) == [2]
