"""Equality by computer algebra: math-verify, kept away from what it does wrongly or for ever."""

from __future__ import annotations

import logging
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.random import seed

MAX_DIGITS = 30
MAX_EXPONENT = 2_000
MAX_FACTORIAL = 200
MAX_EXPANDED_POWER, MANY_SYMBOLS = 10, 3
FLOAT_TOLERANCE, EXACT_TOLERANCE = 1e-6, 1e-12  # relative; the first where a decimal is involved
NATURAL_SYMBOLS = frozenset("nmk")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off

# Units are taken off before: math-verify's own rule takes the c of "x + c" for one.
_EXTRACTION = (
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=True,
            nits=True,
            boxed="none",
            equations=False,
        ),
    ),
)

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i{1,3}nt|oint|lim|limsup|liminf)(?![a-zA-Z])")
_NESTED_LOG = re.compile(
    r"\\(?:log|ln|lg)(?![a-zA-Z])(?:_(?:\{[^{}]*\}|\w))?[\s({]*\\(?:log|ln|lg)(?![a-zA-Z])"
)
_EXPONENT = re.compile(r"\^\{((?:[^{}]|\{[^{}]*\})*)\}")
_POWER_OF_BRACKET = re.compile(r"[)}]\^\{(\d+)\}")
_FACTORIAL = re.compile(r"(\d+|[)}])!")


def hazard(text: str) -> bool:
    """Whether computer algebra should not be asked about a normalised expression.

    Sums, products, integrals and limits run without bound; nested logarithms, numeric power towers, long
    numbers, large exponents, large factorials and high powers of sums of many symbols take seconds, or
    compare as equal when they underflow.
    """
    return (
        _UNBOUNDED.search(text) is not None
        or _NESTED_LOG.search(text) is not None
        or any(len(digits) > MAX_DIGITS for digits in re.findall(r"\d+", text))
        or any(_is_heavy_exponent(exponent) for exponent in _EXPONENT.findall(text))
        or any(_is_heavy_factorial(operand, text) for operand in _FACTORIAL.findall(text))
        or _is_heavy_expansion(text)
    )


def _is_heavy_exponent(exponent: str) -> bool:
    is_tower = "^" in exponent and not _letters(exponent) - {"e"}
    return is_tower or any(int(number) > MAX_EXPONENT for number in re.findall(r"\d+", exponent))


def _is_heavy_factorial(operand: str, text: str) -> bool:
    return int(operand) > MAX_FACTORIAL if operand.isdigit() else not _letters(text)


def _is_heavy_expansion(text: str) -> bool:
    """(a + b + c)^15: comparing two such means multiplying them out."""
    highest = max((int(exponent) for exponent in _POWER_OF_BRACKET.findall(text)), default=0)
    return highest > MAX_EXPANDED_POWER and len(_letters(text)) >= MANY_SYMBOLS


def _letters(text: str) -> set[str]:
    return set(re.findall("[a-zA-Z]", _COMMAND.sub("", text)))


def algebraically_equal(given: str, truth: str) -> bool:
    """Equality by math-verify's LaTeX extractor, strict and without fall-back, with two corrections.

    Numbers must also agree relative to their size, because math-verify compares to an absolute precision
    under which all tiny numbers are equal; and n, m and k stand for positive integers, as they do in
    answers, so that 1/√n is √(1/n).

    Args:
        given: the normalised answer, no hazard.
        truth: the normalised ground truth, no hazard.
    """
    seed(0)  # sympy tries random numbers; a verdict may not depend on the answers graded before
    given_expr, truth_expr = _parse(given), _parse(truth)
    if given_expr is None or truth_expr is None:
        return False
    if verify(truth_expr, given_expr, strict=True, timeout_seconds=None):
        return _relatively_close(given_expr, truth_expr)
    return _equal_for_naturals(given_expr, truth_expr)


def _parse(text: str) -> Any:
    # No time-outs: they rely on SIGALRM, and the process can be killed anyway.
    found = parse(
        f"${text.replace(',', ', ')}$",  # 100,200 would be one number
        extraction_config=_EXTRACTION,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return found[0] if found else None


def _relatively_close(a: Any, b: Any) -> bool:
    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (a, b)):
        return True
    if 0 in (a, b):
        return _is_zero(a - b)
    tolerance = FLOAT_TOLERANCE if a.has(sympy.Float) or b.has(sympy.Float) else EXACT_TOLERANCE
    a_value, b_value = a.doit().evalf(30), b.doit().evalf(30)
    if not (a_value.is_finite and b_value.is_finite):
        return True
    return bool(abs(a_value - b_value) <= tolerance * max(abs(a_value), abs(b_value)))


def _equal_for_naturals(a: Any, b: Any) -> bool:
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    symbols = a.free_symbols | b.free_symbols
    if not symbols or not {str(symbol) for symbol in symbols} <= NATURAL_SYMBOLS:
        return False
    natural = [(symbol, sympy.Symbol(str(symbol), positive=True, integer=True)) for symbol in symbols]
    return _is_zero(a.subs(natural) - b.subs(natural))


def _is_zero(difference: Any) -> bool:
    return sympy.simplify(difference) == 0
