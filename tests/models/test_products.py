"""The kernel of a large product is chosen by trial, once for a machine, and only among those with the usual bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelwright.models import products
from modelwright.models.products import USUAL, Shape

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run by hand on a GPU machine")
FIRST, SECOND = torch.randn(6, 8).bfloat16(), torch.randn(8, 4).bfloat16()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has multiplied nothing yet, and may try."""
    monkeypatch.setattr(products, "_found", {})
    monkeypatch.setattr(products, "_seen", Counter())
    monkeypatch.setattr(products, "_trials", products._Trials(allowed=True))
    monkeypatch.setattr(products, "SEEN", 0)


class Library:
    """Stands for cuBLAS: kernels that are right or wrong, and take as long as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path, seconds: dict[int, float]) -> None:
        self.kernels = sorted(set(seconds) - {USUAL})
        self.wrong: set[int] = set()
        self.trials = 0
        self._seconds, self._now = seconds, USUAL
        monkeypatch.setattr(products, "is_large", lambda first, second: True)
        monkeypatch.setattr(products, "_library", lambda: self)
        monkeypatch.setattr(products, "_product", lambda shape, device: self)
        monkeypatch.setattr(products, "_name", str)
        monkeypatch.setattr(products, "_warm", lambda run: None)
        monkeypatch.setattr(products, "_seconds", self._timed)
        forget(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(products, "cache_dir", lambda: cache)

    def run(self, number: int, first: Tensor, second: Tensor, to: Tensor) -> bool:
        self._now = number
        torch.mm(first, second, out=to)
        to.add_(1.0 if number in self.wrong else 0.0)
        return True

    def _timed(self, run: Callable[[], Any], long: float) -> float:
        self.trials, self._now = self.trials + 1, USUAL
        run()
        return self._seconds[self._now]

    @property
    def last(self) -> int:
        return self._now


def test_the_fastest_kernel_is_taken_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 1.0, 1: 0.96, 2: 0.98})
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert library.last == 1 and library.trials
    again = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5, 1: 0.9})
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert again.last == 1 and not again.trials, "what was found before is tried again"


def test_a_kernel_with_other_bits_takes_no_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5, 1: 0.9})
    library.wrong = {0}
    products.mm(FIRST, SECOND)
    assert list(products._found.values()) == [1]


def test_a_gain_that_may_be_chance_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.995})
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert list(products._found.values()) == [USUAL]


def test_what_cannot_be_tried_is_multiplied_as_usual_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5})

    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(library, "run", full)
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert not (tmp_path / products.KEPT).exists()


@pytest.mark.parametrize(
    ("wish", "kept", "chosen"),
    [
        ("auto", {}, False),
        ("auto", {"here: 4x4x4 NN (4, 4)": 1}, True),
        ("auto", {"another card: 4x4x4 NN (4, 4)": 1}, False),
        ("always", {}, True),
        ("never", {"here: 4x4x4 NN (4, 4)": 1}, False),
    ],
)
def test_products_are_left_to_torch_where_no_kernel_is_known_and_none_is_tried(
    monkeypatch: pytest.MonkeyPatch, wish: str, kept: dict[str, int], chosen: bool
) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(products, "_here", lambda: "here")
    monkeypatch.setattr(products, "_read", lambda: kept)
    products.allow(wish, 1e15)
    assert products._trials.known == chosen


def test_what_was_found_is_in_sight_where_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(products, "_library", lambda: object())
    monkeypatch.setattr(products, "_read", lambda: {"NVIDIA H200, torch 2: 4x4x4 NN (4, 4)": 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    products.allow("auto", 1e15)
    assert not products._trials.known


def test_nothing_is_tried_before_it_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5})
    monkeypatch.setattr(products, "SEEN", 2)
    for _ in range(2):  # a shape that may never come again
        products.mm(FIRST, SECOND)
    products.allow("auto", 1e15)
    products.mm(FIRST, SECOND)
    assert not library.trials
    products.allow("auto", 1e20)
    products._trials.seconds = 2 * products.MOST_SECONDS
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert not library.trials and not (tmp_path / products.KEPT).exists()


def test_known_kernels_are_left_where_that_is_wished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5})
    products.mm(FIRST, SECOND)
    again = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5})
    products.allow("never", 1e20)
    products.mm(FIRST, SECOND)
    assert again.last == USUAL


@pytest.mark.parametrize("error", [OSError("the disk is full"), FileNotFoundError("another rank was faster")])
def test_a_cache_that_cannot_be_written_ends_nothing(
    error: OSError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(*_: Any) -> None:
        raise error

    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.5})
    monkeypatch.setattr(products, "write_json", write)
    products.mm(FIRST, SECOND)
    assert library.last == 0


def test_a_file_that_is_not_ours_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / products.KEPT).write_text('{"a shape": "no number"}', encoding="utf-8")
    library = Library(monkeypatch, tmp_path, {USUAL: 1.0, 0: 0.9})
    products.mm(FIRST, SECOND)
    assert library.last == 0


def test_small_products_and_other_devices_are_torchs() -> None:
    into = torch.ones(6, 4)
    products.add_mm(into, FIRST.float(), SECOND.float())
    torch.testing.assert_close(into, 1.0 + FIRST.float() @ SECOND.float())
    assert torch.equal(products.mm(FIRST, SECOND), FIRST @ SECOND)
    assert not products.is_large(torch.empty(1 << 20, 1 << 10, device="meta"), torch.empty(1 << 10, 4, device="meta"))


def test_how_matrices_lie_in_memory_is_part_of_the_shape() -> None:
    to = torch.empty(6, 4, dtype=torch.bfloat16)
    wide = torch.empty(6, 24, dtype=torch.bfloat16)
    turned = torch.empty(4, 8, dtype=torch.bfloat16).T
    assert products._shape_of(FIRST, SECOND, to, False) == Shape(6, 4, 8, (False, 8), (False, 4), False)
    assert products._shape_of(wide[:, 8:16], turned, to, True) == Shape(6, 4, 8, (False, 24), (True, 8), True)
    assert products._shape_of(wide[:, 1:9], turned, to, True) is None, "a kernel reads 16 bytes at once"
    assert products._shape_of(FIRST, SECOND, wide[:, :4], False) is None
    assert products._shape_of(wide[:, ::2], SECOND, to, False) is None
    assert products._shape_of(FIRST, SECOND, to.float(), False) is None


@needs_gpu
@pytest.mark.gpu
def test_every_kernel_of_every_layout_multiplies_as_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(products, "cache_dir", lambda: tmp_path)
    forget(monkeypatch)

    def some(rows: int, columns: int, apart: int = 0) -> Tensor:
        return torch.randn(rows, columns + apart, device="cuda", dtype=torch.bfloat16)[:, :columns]

    for first, second in (
        (some(4096, 8192), some(8192, 6144)),
        (some(4096, 8192), some(6144, 8192).T),
        (some(8192, 4096).T, some(8192, 6144)),
        (some(8192, 4096, 512).T, some(8192, 6144, 1024)),
    ):
        expected = torch.mm(first, second)
        shape = products._shape_of(first, second, expected, False)
        assert shape is not None
        product, made = products._product(shape, expected.device), torch.empty_like(expected)
        assert product.kernels
        for number in range(len(product.kernels)):
            made.zero_()
            assert product.run(number, first, second, made)
            torch.testing.assert_close(made, expected, rtol=2e-2, atol=0.5)
        assert torch.equal(products.mm(first, second), expected)
        sums = some(4096, 6144).contiguous()
        by_torch = torch.addmm(sums, first, second)
        products.add_mm(sums, first, second)
        assert torch.equal(sums, by_torch)
        graph, made = torch.cuda.CUDAGraph(), torch.empty_like(expected)
        with torch.cuda.graph(graph):
            products.mm(first, second, made)
        made.zero_()
        graph.replay()
        assert torch.equal(made, expected)
    assert (tmp_path / products.KEPT).exists() and len(products._found) == 8
