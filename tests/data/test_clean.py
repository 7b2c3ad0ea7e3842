"""Cleaning brings text to one form, and says of each document that goes which rule it broke and by how much."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from modelwright.data.prepare.clean import (
    LineFilter,
    clean_document,
    compile_line_filter,
    duplicate_ngram_fraction,
    normalize_text,
)
from modelwright.data.prepare.dedup import shingle
from modelwright.recipe.prepare_config import PrepareConfig

PROSE = "The ship left the harbour at dawn, and nobody on the pier knew where it was going.\n"


def rule_of(text: str, **settings: Any) -> str | None:
    drop = clean_document(text, PrepareConfig(**settings)).dropped_by
    return drop.filter if drop else None


def test_text_is_brought_to_one_form() -> None:
    text = "\ufeffe\u0301te\u0301\r\n  indented \t\r\rzero\u200bwidth\x00\n\n\n\n\nend\u2028line  "
    assert normalize_text(text, "NFC") == "été\n  indented\n\nzerowidth\n\nend\nline"
    assert normalize_text("ﬁne", "NFKC") == "fine"
    assert normalize_text("e\u0301", "none") == "e\u0301"


def test_ordinary_prose_code_and_other_scripts_stay() -> None:
    code = 'def read(path):\n    """Read a file."""\n    with open(path) as file:\n        return file.read()\n'
    chinese = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 5
    for text in (PROSE * 3, code, f"{chinese} 寒来暑往 秋收冬藏 闰余成岁 律吕调阳"):
        assert rule_of(text, max_repeated_lines=1) is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("too short", "min_words"),
        (f"{'QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo' * 4} " * 6, "max_mean_word_length"),
        ("a | b | c | d -- ++ == <> <> {} {} [] [] ## ## !!", "max_symbol_ratio"),
        ("12 345 6789 4321 998 1000 2000 x", "max_digit_ratio"),
        ("\n".join(f"- item {number} of the list" for number in range(9)), "max_bullet_lines"),
        ("\n".join(f"Read more about topic {number}..." for number in range(9)), "max_ellipsis_lines"),
        (PROSE * 9, "max_repeated_lines"),
    ],
)
def test_each_rule_finds_what_it_is_for(text: str, rule: str) -> None:
    assert rule_of(text) == rule


def test_boilerplate_lines_go_and_the_rest_stays() -> None:
    cleaned = clean_document(
        f"Share this on Facebook\n{PROSE}Privacy Policy\nPlease enable JavaScript to go on.\nThe end.", PrepareConfig()
    )
    assert (cleaned.text, cleaned.lines_dropped) == (f"{PROSE}The end.", 3)


def test_rules_of_ones_own_are_regular_expressions() -> None:
    assert rule_of(f"CONFIDENTIAL {PROSE}", drop_documents={"secret": "CONFIDENTIAL"}) == "drop_documents.secret"
    assert clean_document(f"page 3\n{PROSE}", PrepareConfig(drop_lines=[r"page \d+"])).text == PROSE.strip()


def test_text_that_repeats_itself_is_measured_by_its_word_runs() -> None:
    shares = duplicate_ngram_fraction(shingle([PROSE, "one two three four five six " * 20, "a b"], 5))
    assert shares[0] == 0 and shares[1] > 0.9 and shares[2] == 0


def test_a_line_of_a_hundred_thousand_characters_and_ten_thousand_empty_ones_cost_nothing() -> None:
    long = f"{PROSE}{'x' * 100_000}\n{'- ' * 50_000}\n{'.' * 100_000}{chr(10) * 10_000}{PROSE}"
    begun = time.process_time()
    clean_document(long, PrepareConfig())
    assert time.process_time() - begun < 5  # the square of the length would take minutes


def test_a_guarded_search_takes_out_the_lines_that_every_line_held_against_the_patterns_would_lose() -> None:
    patterns = (*PrepareConfig().drop_lines, r"page \d+", r"(?:foo|ba[rz])+!?", r"(?i)x{0}(report|reject)ed.*")
    boilerplate = compile_line_filter(patterns)
    assert boilerplate is not None and "cookies" in boilerplate.required_literals
    bare = LineFilter(boilerplate.pattern, ())
    lines = ["Accept all cookies", "PRIVACY POLICY", "Cookie\u017f policy", "the cookies are good", "page 3", "",
             "page three", "foobar!", "food", "Rejected by all", "share", "Share this", "EMAIL", "é share"]  # fmt: skip
    rng = random.Random(4)
    for _ in range(200):
        text = "\n".join(rng.choices(lines, k=rng.randrange(12)))
        assert boilerplate.remove_from(text) == bare.remove_from(text)
    assert compile_line_filter((r"\d+", "abc")).required_literals == ()  # type: ignore[union-attr]
