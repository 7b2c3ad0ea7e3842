"""Engine rule 4: a checkpoint is complete or absent; damage is noticed, set aside, and the one before it used."""

from __future__ import annotations

from pathlib import Path

from tests.faults.fork_server import ForkServer, run_fingerprint
from tiny import tiny_recipe


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_model_of_a_finished_stage_is_made_again(
    fork_server: ForkServer, uninterrupted: Path, model_folder: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder)
    assert fork_server.run(["run", str(recipe)], tmp_path)[0] == 0
    flip(tmp_path / "run/stages/sft/model/model.safetensors")
    code, output = fork_server.run(["run", str(recipe)], tmp_path)
    assert code == 0, output
    assert "model.safetensors of the sft model is damaged; it is made again" in output
    assert run_fingerprint(tmp_path / "run") == run_fingerprint(uninterrupted)


def test_a_damaged_best_checkpoint_is_never_exported(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    # the first measurement is made the best by hand, its checkpoint damaged just before the end
    first = """
from modelwright.engine.trainer import Engine
from modelwright.stages.stage_runner import StageRunner
evaluate = Engine.evaluate
Engine.evaluate = lambda self, *rest: {"eval_loss": 1.0 + self.cursor.step if self.cursor.step else 99.0}
finish = StageRunner._finish
def damaged(self):
    path = self._checkpoint_dir(6) / "model.safetensors"
    data = bytearray(path.read_bytes()); data[-1] ^= 1; path.write_bytes(data)
    return finish(self)
StageRunner._finish = damaged
"""
    recipe = tiny_recipe(tmp_path, model_folder)
    code, output = fork_server.run(["run", str(recipe)], tmp_path, first=first)
    assert code == 0, output
    assert "the checkpoint of step 6, the best, is damaged; the next best is taken" in output
    assert '"eval_loss": 13.0' in (tmp_path / "run/stages/sft/result.json").read_text()
