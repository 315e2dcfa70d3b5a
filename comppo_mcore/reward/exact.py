"""Exact values of numeric expressions in (sloppy) LaTeX, as rational numbers.

General computer algebra compares numbers by evaluating them to some digits: 1/2⁹⁹ and 1/2⁹⁸, or 1/2004!
and 1/2006!, then count as equal. What can be computed exactly, within a bound, is computed exactly.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 200_000  # of any intermediate numerator or denominator
MAX_FACTORIAL = 10_000  # 10 000! has 118 458 bits

_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>(?P<head>\d*)\.(?P<fixed>\d*)\\overline\{(?P<period>\d+)\})"
    r"|(?P<decimal>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<symbol>\\frac|\\binom|\\cdot|\\times|\\div|[-+*/^!(){}]))"
)


class NotExact(Exception):
    """The text is not a rational expression this module reads."""


class TooLarge(Exception):
    """The value is rational but has more digits than are worth computing."""


def exact_value(text: str) -> Fraction:
    r"""Evaluate + − · / ^ ! \frac \binom, mixed numbers and repeating decimals.

    Args:
        text: a normalised answer, see `normalize`.

    Returns:
        Its value, exact.

    Raises:
        NotExact: the text is anything else.
        TooLarge: an intermediate value exceeds MAX_BITS.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if parser.peek() is not None:
        raise NotExact(text)
    return value


Token = Fraction | str


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotExact(text)
        tokens.append(_token(match))
        position = match.end()
    return tokens


def _token(match: re.Match[str]) -> Token:
    if match["symbol"]:
        return match["symbol"]
    if match["repeating"]:
        head, fixed, period = match["head"], match["fixed"], match["period"]
        # 0.1666… = (16 − 1) / 90: all digits less the unrepeated ones, over 9…90…0.
        digits = int(head + fixed + period) - int(head + fixed or 0)
        return Fraction(digits, (10 ** len(period) - 1) * 10 ** len(fixed))
    mantissa, _, exponent = match["decimal"].lower().partition("e")
    if len(exponent) > 5:
        raise TooLarge(match["decimal"])
    return _bounded(Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge
    return value


class _Parser:
    """Recursive descent over tokens; every method consumes what it evaluates."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._position = 0

    def peek(self) -> Token | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def take(self) -> Token | None:
        token = self.peek()
        self._position += 1
        return token

    def expect(self, symbol: str) -> None:
        if self.take() != symbol:
            raise NotExact(symbol)

    def sum(self) -> Fraction:
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _bounded(value + sign * self.product())
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while (token := self.peek()) is not None:
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value = _bounded(value * self.signed())
            elif token in ("/", "\\div"):
                self.take()
                value = _bounded(_divide(value, self.signed()))
                if self.peek() in ("(", "\\frac", "\\binom"):
                    raise NotExact("a/b(c) reads both ways")
            elif token in ("(", "\\frac", "\\binom"):
                value = _bounded(value * self.power())
            else:
                break
        return value

    def signed(self) -> Fraction:
        if self.peek() in ("+", "-"):
            return self.signed() if self.take() == "+" else -self.signed()
        return self.power()

    def power(self) -> Fraction:
        base = self.postfix()
        if self.peek() != "^":
            return base
        self.take()
        return _power(base, self.exponent())

    def exponent(self) -> Fraction:
        if self.peek() in ("+", "-"):
            return self.exponent() if self.take() == "+" else -self.exponent()
        value = self.primary()
        if self.peek() == "!":
            raise NotExact("2^3! reads both ways")
        if self.peek() == "^":
            self.take()
            return _power(value, self.exponent())
        return value

    def postfix(self) -> Fraction:
        value = self.primary()
        if self.peek() != "!":
            return value
        self.take()
        if self.peek() == "!":
            raise NotExact("5!! is a double factorial to some")
        return _factorial(value)

    def primary(self) -> Fraction:
        token = self.take()
        if isinstance(token, Fraction):
            return self.mixed(token)
        if token == "\\frac":
            return _divide(self.group(), self.group())
        if token == "\\binom":
            return _binomial(self.group(), self.group())
        closing = {"(": ")", "{": "}"}.get(token or "")
        if closing is None:
            raise NotExact(token)
        value = self.sum()
        self.expect(closing)
        return value

    def group(self) -> Fraction:
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    def mixed(self, whole: Fraction) -> Fraction:
        r"""2\frac{1}{2} is two and a half; before an improper fraction there is no agreed reading."""
        if self.peek() != "\\frac":
            return whole
        self.take()
        numerator, denominator = self.group(), self.group()
        integers = all(part.denominator == 1 for part in (whole, numerator, denominator))
        if not (integers and 0 < numerator < denominator):
            raise NotExact("not a mixed number")
        return whole + numerator / denominator


def _divide(a: Fraction, b: Fraction) -> Fraction:
    if b == 0:
        raise NotExact("division by zero")
    return a / b


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NotExact("a root or an undefined power")
    if base in (0, 1):
        return base
    if base == -1:
        return Fraction(1 if exponent % 2 == 0 else -1)
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > MAX_BITS:
        raise TooLarge
    return base ** int(exponent)


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise NotExact("factorial of a fraction or a negative number")
    if value > MAX_FACTORIAL:
        raise TooLarge
    return Fraction(math.factorial(int(value)))


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise NotExact("binomial outside Pascal's triangle")
    if n > MAX_FACTORIAL:
        raise TooLarge
    return Fraction(math.comb(int(n), int(k)))
