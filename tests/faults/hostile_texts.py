"""Strings that would do harm where text is not kept as text."""

from __future__ import annotations

HOSTILE = [
    "<script>window.harm = 1</script>",
    "</script><script>window.harm = 1</script>",
    '"><img src=x onerror="window.harm = 1">',
    "<svg/onload=window.harm=1>",
    "<iframe srcdoc='<script>parent.harm=1</script>'></iframe>",
    '<a href="javascript:window.harm=1" id="bait">touch me</a>',
    "javascript:window.harm=1",
    "<style>*{display:none}</style>",
    "</section></main><h1>not ours</h1>",
    "<!--",
    "]]>",
    "<base href='https://example.invalid/'>",
    "<meta http-equiv=refresh content='0;url=https://example.invalid'>",
    "<link rel=stylesheet href=https://example.invalid/x.css>",
    "{{ 7 * 7 }}{% for x in y %}",
    "${7*7} `window.harm = 1`",
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "=cmd|' /C calc'!A0",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "\u202etxt.exe\u2066 turned \u200f\u202c",
    "\u2028\u2029\x00\x08\ufeff",
    "a" * 1_000_000,
    "é" * 300 + " " + "no-break" * 5000,
    "&lt;b&gt; &amp; &#60;",
    "🔥" * 50 + " مرحبا नमस्ते 森",
]
