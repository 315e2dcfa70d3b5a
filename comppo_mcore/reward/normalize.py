"""Rewrite an answer into one spelling: plain ASCII LaTeX without decoration."""

from __future__ import annotations

import re
import unicodedata

# What NFKC would flatten into digits side by side: 2½ must not become 21/2, nor x² become x2.
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+")
_RADICAND = re.compile(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])")

_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "‐": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∙": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "√": r"\sqrt ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "θ": r"\theta ",
        "λ": r"\lambda ",
        "€": "",
        "£": "",
        "¥": "",
        **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""),
    }
)

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # decoration
        (r"\\(?:left|right)(?![a-zA-Z])\s*\.?|\\[bB]igg?[lrm]?(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\\$|\$|\\[()\[\]]", ""),
        (r"\\%", "%"),
        (r"\*\*(.*)\*\*", r"\1"),
        (r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        # synonyms
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne "),
        (r"\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s)", ","),
        (r"(?<![a-zA-Z\\])(pi|sqrt|infty)(?![a-zA-Z])", r"\\\1 "),
        (r"\\infinity(?![a-zA-Z])", r"\\infty "),
        # braces that TeX lets one leave out
        (r"\\bar\s*(?=\d|\{\d+\})", r"\\overline"),
        (r"\\overline\s*(\d)", r"\\overline{\1}"),
        (r"\\frac(?![a-zA-Z])\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac(?![a-zA-Z])\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"\\sqrt(?![a-zA-Z])\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\^\s*(\d+|[a-zA-Z])", r"^{\1}"),
        (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
        # numbers
        (r"(?<![\d.])(\d+)\s+([1-9]\d*)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    )
)

_TEX_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|,\\!|\{,\}|\\[ ;:]|~)(?=\d{3}(?!\d))")
_PLAIN_THOUSANDS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])|(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d ,/])"
)
_WRAPPER = re.compile(
    r"(?:\\(?:boxed|fbox|text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*)?\{"
)
_NEEDLESS_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")


def normalize(answer: str, join_thousands: bool = True) -> str:
    r"""Rewrite an answer into one spelling.

    Unicode mathematics becomes LaTeX (½ → \frac{1}{2}, √2 → \sqrt{2}, U+2212 → -, full-width → ASCII);
    decoration goes (\left, \displaystyle, \boxed, \text around the whole, $, spacing); left-out
    braces return (\frac52 → \frac{5}{2}); 2 1/2 becomes 2\frac{1}{2}; 1\,000 and 1,000 become 1000.

    Args:
        answer: text between the answer tags or in the box, or the ground truth.
        join_thousands: whether `1,000` and `1 000` are one number; else they are left alone.

    Returns:
        The rewritten text, without spaces except between two letters or digits.
    """
    text = _to_ascii(answer)
    text = _TEX_THOUSANDS.sub("", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _brace_radicands(text)
    text = _unwrap(" ".join(text.split()))
    if join_thousands:
        text = _PLAIN_THOUSANDS.sub(_join_outside_brackets, text)
    return _NEEDLESS_SPACE.sub("", text)


def _to_ascii(text: str) -> str:
    text = "".join(_vulgar_fraction(character) for character in text)
    text = _SUPERSCRIPT.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run.group())}}}", text)
    text = _SUBSCRIPT.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run.group())}}}", text)
    text = _RADICAND.sub(r"\\sqrt{\1}", unicodedata.normalize("NFKC", text))
    return text.translate(_CHARACTERS)


def _vulgar_fraction(character: str) -> str:
    decomposition = unicodedata.decomposition(character)
    if not decomposition.startswith("<fraction>"):
        return character
    parts = "".join(chr(int(code, 16)) for code in decomposition.split()[1:])
    numerator, _, denominator = parts.partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _brace_radicands(text: str) -> str:
    r"""sqrt(x + 1) → \sqrt{x + 1}."""
    pieces = []
    while (start := text.find(r"\sqrt")) >= 0:
        head, text = text[: start + 5], text[start + 5 :].lstrip()
        pieces.append(head)
        end = _matching(text, "(", ")") if text.startswith("(") else None
        if end is not None:
            text = f"{{{text[1:end]}}}{text[end + 1 :]}"
    return "".join(pieces) + text


def _unwrap(text: str) -> str:
    r"""Take off \boxed, \text, braces around the whole and punctuation after it."""
    while True:
        text = text.strip()
        if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
            text = text[:-1]
            continue
        wrapper = _WRAPPER.match(text)
        if wrapper is None:
            return text
        start = wrapper.end() - 1
        if _matching(text[start:], "{", "}") != len(text) - start - 1:
            return text
        text = text[start + 1 : -1]


def _matching(text: str, opening: str, closing: str) -> int | None:
    depth = 0
    for index, character in enumerate(text):
        if character in (opening, closing) and text[index - 1 : index] != "\\":
            depth += 1 if character == opening else -1
            if depth == 0:
                return index
    return None


def _join_outside_brackets(number: re.Match[str]) -> str:
    """Inside brackets, as in the point (1,000), a comma parts two numbers."""
    before = number.string[: number.start()]
    depth = sum(before.count(opening) for opening in ("(", "[", r"\{"))
    depth -= sum(before.count(closing) for closing in (")", "]", r"\}"))
    return number.group() if depth > 0 else re.sub("[ ,]", "", number.group())
