"""Caches are put in a writable folder, also in a container with a random user and a read-only home."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import other_user
from modelwright.cli import recipe
from modelwright.cli.main import main
from modelwright.runs.caches import (
    PINNED_ALLOC_CONF,
    _set_pinned_alloc_conf,
    cache_dir,
    prepare_environment,
    remove_truncated_kernels,
    remove_truncated_libraries,
    triton_cache,
    truncated_at_start,
    use_empty_compile_cache,
)

KERNEL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 2
CACHES = ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MODELWRIGHT_CACHE", "HOME")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:
        monkeypatch.setenv(name, "")  # so that whatever the test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which nothing can be written, not even by root: it is a file."""
    home = tmp_path / "home"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_the_cache_is_where_it_is_asked_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "modelwright"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "modelwright"
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "ours"))
    assert cache_dir() == tmp_path / "ours"


def test_an_unwritable_cache_dir_is_skipped(no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(no_home / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "modelwright"


def test_without_a_home_the_cache_is_a_folder_of_our_own_in_the_temporary_one(no_home: Path) -> None:
    folder = cache_dir()
    assert folder == Path(tempfile.gettempdir()) / f"modelwright-{os.getuid()}"
    assert folder.is_dir()


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_environment()
    assert not set(CACHES[:3]) & set(os.environ)


def test_compiled_kernels_outlive_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_environment()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / ".cache/modelwright/inductor"
    assert triton_cache() == tmp_path / ".triton/cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    prepare_environment()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


def test_without_a_home_the_libraries_get_a_cache_dir_that_works(no_home: Path) -> None:
    prepare_environment()
    for name in CACHES[:4]:
        folder = Path(os.environ[name])
        folder.mkdir(parents=True, exist_ok=True)
        assert os.access(folder, os.W_OK), name


def test_a_cache_that_somebody_chose_and_can_write_is_kept(no_home: Path, tmp_path: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    prepare_environment()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_a_cache_of_one_library_does_not_stand_for_the_others(no_home: Path, tmp_path: Path) -> None:
    os.environ["HF_HOME"] = str(tmp_path / "hub")
    prepare_environment()
    assert os.environ["HF_HOME"] == str(tmp_path / "hub")
    assert str(no_home) not in os.environ["TRITON_CACHE_DIR"]


def test_a_cache_in_a_folder_of_another_user_is_replaced(tmp_path: Path) -> None:
    if reason := other_user.unavailable():
        pytest.skip(reason)
    tmp_path.chmod(0o700)
    code = (
        "import os; from modelwright.runs.caches import prepare_environment; prepare_environment();"
        "print(os.environ['TRITON_CACHE_DIR'])"
    )
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "HOME": "/nowhere"}
    done = subprocess.run([*other_user.as_user(4321, 4321), sys.executable, "-c", code], capture_output=True,
                          text=True, timeout=60, check=False, env=environ, cwd="/")  # fmt: skip
    assert (done.returncode, Path(done.stdout.strip()).name) == (0, "triton"), done.stderr
    assert str(tmp_path) not in done.stdout


def test_the_hub_s_own_cache_moves_away_from_a_home_that_is_none(no_home: Path) -> None:
    code = (
        "from modelwright.runs.caches import prepare_environment; prepare_environment();"
        "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(no_home) not in done.stdout


def where_torch_is_compiled_to(folder: Path, *first: str, **environment: str) -> str:
    """What Python says of a torch without bytecode, after we have looked for a place for it."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch/__init__.py").touch()
    code = "from modelwright.runs.caches import prepare_environment; prepare_environment(); import torch, pathlib; "
    code += "print(torch.__cached__ if pathlib.Path(torch.__cached__).exists() else 'nowhere')"
    paths = os.pathsep.join([str(folder), *sys.path])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**inherited, "PYTHONPATH": paths, "HOME": str(folder), **environment}
    done = subprocess.run([sys.executable, *first, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_bytecode_that_python_does_not_keep_is_kept_in_our_cache(tmp_path: Path) -> None:
    ours = tmp_path / ".cache/modelwright/bytecode"
    first = where_torch_is_compiled_to(tmp_path, "-B")
    assert first.startswith(str(ours)) and where_torch_is_compiled_to(tmp_path, "-B") == first
    assert ours.stat().st_mode & 0o077 == 0


def test_bytecode_is_left_where_python_or_somebody_else_keeps_it(tmp_path: Path) -> None:
    theirs = str(tmp_path / "theirs")
    assert where_torch_is_compiled_to(tmp_path, PYTHONPYCACHEPREFIX=theirs).startswith(theirs)
    pycache = str(tmp_path / "torch/__pycache__")
    assert where_torch_is_compiled_to(tmp_path).startswith(pycache)
    assert where_torch_is_compiled_to(tmp_path, "-B").startswith(pycache)
    assert not (tmp_path / ".cache/modelwright").exists()


def test_bytecode_is_never_read_from_where_others_may_write(tmp_path: Path) -> None:
    ours = tmp_path / ".cache/modelwright/bytecode"
    ours.mkdir(parents=True)
    ours.chmod(0o777)
    assert where_torch_is_compiled_to(tmp_path, "-B") == "nowhere"
    ours.chmod(0o700)
    ours.parent.chmod(0o777)  # it could be replaced there
    assert where_torch_is_compiled_to(tmp_path, "-B") == "nowhere"
    ours.parent.chmod(0o755)
    assert where_torch_is_compiled_to(tmp_path, "-B") != "nowhere"


TABLES = """
import importlib.metadata, hashlib, sys
from modelwright.runs.caches import transformers_tables

made, original = [], importlib.metadata.packages_distributions
importlib.metadata.packages_distributions = lambda: made.append("packages") or original()
with transformers_tables():
    import transformers, transformers.models
    from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as packages
classes = [sorted(module._class_to_module.items()) for module in (transformers, transformers.models)]
names = sorted((name, tuple(found)) for name, found in packages.items())
print(made, len(classes[0]) > 1000, hashlib.sha256(repr((classes, names)).encode()).hexdigest())
"""


def test_transformers_takes_its_tables_from_our_cache(tmp_path: Path) -> None:
    def import_it() -> list[str]:
        env = {**os.environ, "MODELWRIGHT_CACHE": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", TABLES], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = import_it(), import_it()
    assert first[:2] == ["['packages']", "True"] and second == ["[]", *first[1:]]
    [table] = (tmp_path / "bytecode").iterdir()
    table.write_bytes(table.read_bytes()[:-100])
    assert import_it() == first, "a truncated one is made again"
    assert import_it() == second
    table.parent.chmod(0o777)
    assert import_it() == first, "one that others may write is not read"


def test_truncated_bytecode_is_removed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, prefix = tmp_path / "cut_short.py", tmp_path / "bytecode" / "image"
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path))
    source.write_text("VALUE = 1\n" * 50, encoding="utf-8")
    monkeypatch.setattr(sys, "pycache_prefix", str(prefix))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("cut_short")
    [compiled] = prefix.rglob("*.pyc")
    compiled.write_bytes(compiled.read_bytes()[:60])
    del sys.modules["cut_short"]
    monkeypatch.setattr(recipe, "register", lambda app: importlib.import_module("cut_short"))
    with pytest.raises(SystemExit) as left:
        main(["recipes"])
    assert left.value.code == 75 and "was cut short" in capsys.readouterr().err
    assert not prefix.exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": PINNED_ALLOC_CONF}),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": f"a:1,{PINNED_ALLOC_CONF}"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": f"a:1,{PINNED_ALLOC_CONF}"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:False"},) * 2,
    ],
)
def test_memory_is_pinned_in_the_background_unless_the_environment_says_otherwise(
    environment: dict[str, str], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, environment.get(name, ""))
        if name not in environment:
            monkeypatch.delenv(name)
    _set_pinned_alloc_conf(tmp_path / "torch without GPUs")
    assert {name: os.environ[name] for name in names if name in os.environ} == environment
    _set_pinned_alloc_conf(tmp_path)
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def test_libraries_that_were_cut_are_taken_out_of_a_compile_cache(tmp_path: Path) -> None:
    import _ctypes

    data = Path(_ctypes.__file__).read_bytes()
    files = {"wh/cwhole.main.so": data, "cu/ccut.main.so": data[: len(data) // 2], f"triton/0/{KERNEL}/run.so": b"",
             f"{KERNEL}/head.so": data[:40], "mine/own.so": b"no library"}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(content)
    assert remove_truncated_libraries(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.rglob("*.so")) == ["cwhole.main.so", "own.so"]


def test_a_cut_library_of_triton_is_gone_before_anybody_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / KERNEL).mkdir()
    (tmp_path / KERNEL / "cuda_utils.so").write_bytes(b"\x7fELF")
    prepare_environment()
    assert truncated_at_start() == 1 and truncated_at_start() == 0 and not list(tmp_path.rglob("*.so"))


def test_kernels_that_were_cut_are_taken_out_of_tritons_cache_as_a_whole(tmp_path: Path) -> None:
    import _ctypes

    data = Path(_ctypes.__file__).read_bytes()
    complete = {"__grp__add.json": b'{"child_paths": {}}', "add.json": b'{"name": "add"}', "add.cubin": data}
    damage: dict[str, dict[str, bytes]] = {
        "A": {}, "B": {"add.json": b'{"name": "a'}, "C": {"__grp__add.json": b""}, "D": {"add.cubin": data[:900]},
    }  # fmt: skip
    entries = {key * 52: broken for key, broken in damage.items()}
    not_tritons = {f"{'E' * 52}/tmp.pid_7": {"add.json": b"{"}, "somebody's data": {"add.json": b"[1]"},
                   "ab": {"cab.json": b""}}  # fmt: skip
    for name, broken in {**entries, **not_tritons}.items():
        (tmp_path / name).mkdir(parents=True)
        for file, content in {**complete, **broken}.items():
            (tmp_path / name / file).write_bytes(content)
    assert remove_truncated_kernels(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A" * 52, "E" * 52, "ab", "somebody's data"]
    assert len(list(tmp_path.rglob("*.*"))) == 4 * len(complete) + 2


def test_a_cache_is_found_and_looked_after_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where nobody knows the user
    assert triton_cache() == Path("~/.triton/cache") and remove_truncated_libraries(triton_cache()) == 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert triton_cache() == tmp_path


def test_a_fresh_cache_is_fresh_for_triton_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "/broken")
    use_empty_compile_cache()
    assert triton_cache().parent == Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == next(tmp_path.iterdir())


def test_processes_that_start_together_make_a_cache_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from modelwright.data import sources\n"
        "def modules():\n"
        "    with Path(sys.argv[1]).open('a') as file: file.write('parsed\\n')\n"
        "    time.sleep(1); yield 'module', 'text'\n"
        "sources._modules = modules; print(len(sources.python_docs()))"
    )
    environ = {**os.environ, "MODELWRIGHT_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path / "parsed")]
    started = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0] and len(counts) == 1
    assert (tmp_path / "parsed").read_text() == "parsed\n"
