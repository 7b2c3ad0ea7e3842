"""Near-duplicates are found, verified, and the same on every device; every dropped document is itself similar."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from modelwright.data.prepare import dedup
from modelwright.data.prepare.dedup import Shingles, hash_words, shingle
from modelwright.data.sources import python_docs

Array = np.ndarray[Any, np.dtype[Any]]


@cache
def documents() -> list[str]:
    """Real documents, and copies of some with one word in a hundred, in twenty and in five changed."""
    texts = [text for _, text in python_docs()[79:379]]
    rng = np.random.default_rng(3)
    for start, share in ((0, 0.01), (50, 0.05), (100, 0.2)):
        for text in texts[start : start + 50]:
            parts = text.split(" ")
            for index in rng.choice(len(parts), max(1, int(share * len(parts))), replace=False):
                parts[index] = f"changed{index}"
            texts.append(" ".join(parts))
    return texts


@cache
def signed() -> Array:
    return dedup.minhash_signatures(shingle(documents(), dedup.NGRAM_SIZE))


def bring(signatures: Array) -> Callable[[Array], Array]:
    return lambda numbers: signatures[numbers]


def clusters_of(signatures: Array, threshold: float = 0.7) -> Array:
    everyone = np.ones(len(signatures), dtype=np.bool_)
    keys = dedup.band_keys(signatures)
    edges = [dedup.verified_band_pairs(band, everyone, bring(signatures), threshold) for band in keys]
    return dedup.split_unverified(
        dedup.connected_components(len(signatures), np.concatenate(edges)), bring(signatures), threshold
    )


def test_a_word_is_the_same_in_any_case_and_between_any_marks() -> None:
    texts = ["Hello, wide World again now", "hello wide... (world) AGAIN now!", "hello wide world again then"]
    sets = [set(part.tolist()) for part in np.split(shingle(texts, 5).hashes, shingle(texts, 5).offsets[1:-1])]
    assert sets[0] == sets[1] != sets[2]


def test_long_words_and_every_length_around_eight_are_distinguished() -> None:
    texts = ["a" * length for length in (1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200)] + ["a" * 8 + "b", "b" + "a" * 8]
    result = [int(lot.hashes[0]) for text in texts for lot in hash_words([text])]
    assert len(set(result)) == len(texts)


def test_no_run_of_words_reaches_from_one_document_into_the_next() -> None:
    together = shingle(["a b c d e f", "g h", "", "i j k l m"], 5)
    alone = [shingle([text], 5) for text in ("a b c d e f", "g h", "", "i j k l m")]
    assert together.counts.tolist() == [2, 0, 0, 1]
    assert together.hashes.tolist() == [value for each in alone for value in each.hashes.tolist()]


def test_signatures_estimate_the_jaccard_index() -> None:
    shingles, signatures = shingle(documents(), dedup.NGRAM_SIZE), signed()
    sets = [set(part.tolist()) for part in np.split(shingles.hashes, shingles.offsets[1:-1])]
    for original, copy in ((0, 300), (60, 360), (120, 420)):
        exact = len(sets[original] & sets[copy]) / len(sets[original] | sets[copy])
        estimate = dedup.estimated_jaccard(signatures[[original]], signatures[[copy]])[0]
        assert abs(exact - estimate) < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_gives_the_very_same_signatures() -> None:
    shingles = shingle([*documents(), "too short"], dedup.NGRAM_SIZE)
    assert np.array_equal(dedup.signatures_cuda(shingles), dedup.minhash_signatures(shingles))


def test_planted_copies_are_found_and_the_first_document_is_the_one_kept() -> None:
    lowest = clusters_of(signed())
    assert (lowest[300:350] < 300).mean() >= 0.95
    assert (lowest[400:450] >= 300).mean() >= 0.95  # one word in five changed leaves a tenth of the runs
    assert (lowest <= np.arange(len(lowest))).all()


def test_precision_and_recall_hold_against_the_exact_jaccard_index() -> None:
    shingles, lowest = shingle(documents(), dedup.NGRAM_SIZE), clusters_of(signed())
    sets = [set(part.tolist()) for part in np.split(shingles.hashes, shingles.offsets[1:-1])]

    def jaccard(first: int, second: int) -> float:
        return len(sets[first] & sets[second]) / max(1, len(sets[first] | sets[second]))

    dropped = [number for number in range(len(lowest)) if lowest[number] != number]
    assert np.mean([jaccard(int(lowest[number]), number) >= 0.7 for number in dropped]) >= 0.9
    alike = [(a, b) for a in range(300) for b in range(300, 450) if jaccard(a, b) >= 0.8]
    assert len(alike) > 40
    assert np.mean([lowest[a] != a or lowest[b] != b for a, b in alike]) >= 0.97


def test_clusters_are_known_by_their_lowest_document() -> None:
    edges = np.array([[5, 6], [2, 5], [8, 9], [1, 8]])
    assert dedup.connected_components(10, edges).tolist() == [0, 1, 2, 3, 4, 2, 2, 7, 1, 1]
    assert dedup.cluster_size_counts(dedup.connected_components(10, edges)) == {3: 2}
    assert dedup.connected_components(3, np.zeros((0, 2), dtype=np.int64)).tolist() == [0, 1, 2]


def test_a_chain_of_likenesses_does_not_drop_a_document_unlike_the_one_kept() -> None:
    first = np.arange(112, dtype=np.uint32)
    second, third = first.copy(), first.copy()
    second[:20], third[:40] = 1000, 1000  # 0.82 alike in a row, 0.64 from end to end
    signatures = np.stack([first, second, third])
    chained = dedup.connected_components(3, np.array([[0, 1], [1, 2]]))
    assert chained.tolist() == [0, 0, 0]
    assert dedup.split_unverified(chained, bring(signatures), 0.7).tolist() == [0, 0, 2]


def test_the_first_of_each_text_is_found() -> None:
    hashes = np.array([[1, 1], [2, 2], [1, 1], [1, 2], [2, 2]], dtype=np.uint64)
    assert dedup.first_occurrence(hashes).tolist() == [0, 1, 0, 3, 1]


def test_documents_that_hold_a_run_of_an_examination_are_found() -> None:
    known = np.unique(shingle(["the quick brown fox jumps over the lazy dog"], 5).hashes)
    result = dedup.has_ngram_overlap(
        shingle(["He saw the QUICK brown fox jumps, and left", "a quick brown fox", ""], 5), known
    )
    assert result.tolist() == [True, False, False]
    assert not dedup.has_ngram_overlap(Shingles(np.zeros(0, np.uint32), np.zeros(3, np.int64)), known).any()
