"""Take units off the end of an answer, and tell units that contradict each other."""

from __future__ import annotations

import re

_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",  # "inches" less its s
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "°": "degree deg",
    "rad": "radian",
    "dollar": "",
    "cent": "",
    "mph": "",
}
_KNOWN = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}

_POWER = r"(?:\^\{?(?P<power>[23])\}?)?"
_TEXT = r"\\(?:text|mathrm|mbox|textrm|operatorname)\{(?P<text>[^{}\d]*)\}"
_WORDS = r"(?P<words>[A-Za-z]+(?:[ /][A-Za-z]+)*)"
_SUFFIX = re.compile(rf"(?P<body>.*[\d)}}!]|.*\\pi)(?P<space> ?)(?:{_TEXT}|{_WORDS}){_POWER}$", re.DOTALL)
_DEGREE = re.compile(r"(?P<body>.+?)(?:\^\{?\\circ\}?|\\degree)$", re.DOTALL)
_BASE = re.compile(r"(?P<body>[0-9A-Z]+)_\{(?P<base>\d+)\}")
# Shorter words are units only where listed: "2 x" and "\\frac{1}{2}abc" are products.
SHORTEST_WORD, SHORTEST_ATTACHED_WORD = 3, 4


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Part a normalised answer from its unit.

    A unit is what stands in a final \text{…}, a final word of three letters or more, a shorter one that
    is known (5 m, 5cm), or a degree sign. It must follow a digit, a closing bracket, ! or π. The base of
    a numeral (12_8) passes for a unit too: it may be left out, but not be another.

    Args:
        text: a normalised answer.

    Returns:
        (the answer without it, the unit in one spelling or None).
    """
    degrees = _DEGREE.fullmatch(text)
    if degrees:
        return degrees["body"], "°"
    numeral = _BASE.fullmatch(text)
    if numeral:
        return numeral["body"], f"base {numeral['base']}"
    match = _SUFFIX.fullmatch(text)
    if match is None:
        return text, None
    words = (match["text"] or match["words"] or "").strip()
    if match["text"] is None and not _is_bare_unit(words, match["body"][-1], bool(match["space"])):
        return text, None
    return match["body"], _canonical(words, match["power"]) if words else None


def contradict(a: str | None, b: str | None) -> bool:
    """Whether two units are both known and differ: 5 cm is not 5 m, but may be 5 apples."""
    return a is not None and b is not None and a != b and _is_known(a) and _is_known(b)


def _is_bare_unit(words: str, before: str, spaced: bool) -> bool:
    first = re.split("[ /]", words)[0]
    known = _canonical(first, None) in _SPELLINGS
    if spaced:
        return known or len(first) >= SHORTEST_WORD
    # Normalising drops the space after a bracket, so a word of some length counts there.
    return (known and len(first) > 1) or (before in "})" and len(first) >= SHORTEST_ATTACHED_WORD)


def _canonical(words: str, power: str | None) -> str:
    words = words.lower()
    for prefix, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if words.startswith(prefix):
            words, power = words[len(prefix) :], exponent
    singular = words[:-1] if words.endswith("s") and len(words) > 1 else words
    unit = _KNOWN.get(words) or _KNOWN.get(singular) or singular
    return f"{unit}^{power}" if power else unit


def _is_known(unit: str) -> bool:
    return unit.partition("^")[0] in _SPELLINGS or unit.startswith("base ")
