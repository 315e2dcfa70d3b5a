"""The verifier on tricky pairs of response and ground truth, through the real workers."""

from __future__ import annotations

import pytest

from comppo_mcore.config.schema import RewardConfig
from comppo_mcore.data.problems import Problem
from comppo_mcore.reward.pool import Answer, Grader, Verdict

CORRECT = [
    # thousands separators
    ("1000", r"1\,000"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    (r"12,\!345,\!678", "12345678"),
    ("12 345 678", "12,345,678"),
    ("2,100", "2, 100"),
    # fractions, mixed numbers, decimals
    (r"\frac52", "2 1/2"),
    ("2.5", r"2\frac12"),
    (r"-2\frac{1}{2}", "-5/2"),
    (r"\dfrac{3}{4}", "0.75"),
    (".75", r"\tfrac34"),
    ("1.50", "3/2"),
    ("007", "7"),
    ("+7", "7"),
    (r"1.5\times10^3", "1500"),
    ("1 1/3 hours", r"\frac43"),
    # repeating decimals
    (r"0.\overline3", r"\frac13"),
    (r"0.1\overline{6}", "1/6"),
    (r"0.\bar{3}", "1/3"),
    # Unicode
    ("½", "0.5"),
    ("2½", "5/2"),
    ("√2", r"\sqrt{2}"),
    ("2√3", r"\sqrt{12}"),
    ("√(x+1)", r"\sqrt{1+x}"),
    ("１２．５", "25/2"),
    ("−5", "-5"),
    ("–5", "-5"),
    ("x²+2x+1", "(x+1)^2"),
    ("2π", r"2\pi"),
    ("(-∞, 2) ∪ (3, ∞)", r"(-\infty,2)\cup(3,\infty)"),
    ("10⁻³", "0.001"),
    # units, money, percent, degrees
    (r"5\text{ cm}", "5"),
    ("5 centimeters", r"5\,\mathrm{cm}"),
    (r"25\,\mathrm{cm}^2", "25 square centimeters"),
    ("12 apples", "12"),
    (r"11\sqrt2 \text{ cm}", r"11\sqrt{2}"),
    (r"90^\circ", "90"),
    ("90°", "90 degrees"),
    (r"\$1,234.50", "1234.5"),
    (r"50\%", "50"),
    ("50%", r"\frac12"),
    (r"12.5\%", "12.5"),
    ("12_8", "12"),
    # names, words and choices
    ("x = 5", "5"),
    ("5", "x=5"),
    ("2+3=5", "5"),
    ("5! = 120", "120"),
    (r"\text{Yes}", "yes"),
    ("Monday", r"\text{monday}"),
    ("(B)", "B"),
    ("B.", r"\textbf{(B)}"),
    (r"\textbf{(B) } 12", "B"),
    # size that only exact arithmetic gets right
    ("1/2004!", r"\frac{1}{2004!}"),
    ("2004!/2003!", "2004"),
    (r"2^{3^2}", "512"),
    (r"\binom{100}{50}", "100891344545564193334812497256"),
    # algebra
    (r"1/\sqrt n", r"\sqrt{1/n}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
    (r"\frac{n^2+n}{2}", r"\frac{n(n+1)}{2}"),
    ("4^{1/2}", "2"),
    (r"\log_2 8", "3"),
    ("a+b", "b+a"),
    ("3.141593", r"\pi"),
    # lists, sets, intervals, tuples
    ("3, 5", "5,3"),
    ("3 or 5", "3, 5"),
    (r"\pm 2", "2,-2"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"\left(\frac12, 3\right)", "(0.5,3)"),
    ("[0,1)", "[0, 1)"),
    ("x<=5", r"x \leq 5"),
]

WRONG = [
    ("1331, 1728", "1728"),
    ("±2021", "2021"),
    ("7 or 8", "8"),
    ("1/2004!", "1/2006!"),
    ("1/2^{99}", "1/2^{98}"),
    (r"\frac{\sqrt2}{2^{99}}", r"\frac{\sqrt2}{2^{98}}"),
    (r"10^{-20}\pi", r"10^{-21}\pi"),
    ("2^{2^{100}}", "2^{2^{101}}"),
    ("9^{9^{9}}", "9^{9^{8}}"),
    ("100000000!", "100000001!"),
    (r"\log\log\log 10", "1"),
    (r"\sum_{i=1}^{1000000000} i", "5"),
    ("(a+b+c)^{99}", "a^{99}+b^{99}+c^{99}"),
    ("(" * 100 + "1" + ")" * 100, "1"),
    ("9" * 5000, "9" * 4999),
    ("2 1/2", "21/2"),
    ("x²", "x2"),
    ("10 1", "101"),
    ("0.333", "1/3"),
    ("3.14", r"\pi"),
    ("0.5%", "0.5"),
    ("5 cm", "5 m"),
    (r"5\text{ cm}^2", r"5\text{ cm}"),
    ("12_8", "12_9"),
    ("x=5", "y=5"),
    ("x+2=5", "5"),
    ("100000000!=5", "5"),
    ("5m", "5"),
    ("x+c", "x"),
    ("A", "B"),
    ("(C)", "B"),
    ("a", "A"),
    ("a+A", "2a"),
    ("i", "-i"),
    (r"\sqrt{x^2}", "x"),
    (r"\text{even}", r"\text{neve}"),
    ("Yes", "No"),
    ("The answer is 7", "7"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "(0,1)"),
    ("1<x<2", "1<x<3"),
    (r"-\infty", r"\infty"),
    (r"\frac{", "5"),
    ("__import__('os').getcwd()", "5"),
]

WHOLE_RESPONSES = [
    (r"<think>a</think>So \boxed{7}.", "7", "correct"),
    (r"<think>a</think>\fbox{7}", "7", "correct"),
    (r"<think>\boxed{8}</think><answer>7</answer>", "7", "correct"),
    (r"<think>a</think><answer>\boxed{7}</answer>", "7", "correct"),
    (r"<think>a</think><answer>It is \boxed{\frac{1}{2}}</answer>", "0.5", "correct"),
    (r"<think>a</think>\boxed{3}, no: \boxed{7}", "7", "correct"),
    (r"<think>a</think>\boxed{3}, no: \boxed{7}", "3", "wrong"),
    (r"<think>\boxed{7}</think>done", "7", "malformed"),
    (r"<think>a</think>7", "7", "malformed"),
    ("<answer>7</answer>", "7", "malformed"),
]


def _answer(text: str, truth: str) -> Answer:
    problem = Problem("p", messages=(), answer=truth, source="test")
    return Answer(problem, text, finished=True, think_open=False)


def _tagged(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


CASES = [
    *((_tagged(answer), truth, "correct") for answer, truth in CORRECT),
    *((_tagged(answer), truth, "wrong") for answer, truth in WRONG),
    *WHOLE_RESPONSES,
]


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    with Grader(RewardConfig(workers=2, timeout_s=60.0)) as grader:
        return grader.grade([_answer(text, truth) for text, truth, _ in CASES])


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0][:40]}~{CASES[i][1][:20]}")
def test_pair(case: int, verdicts: list[Verdict]) -> None:
    assert verdicts[case].kind == CASES[case][2], verdicts[case]


def test_boxes_are_graded_like_tags(verdicts: list[Verdict]) -> None:
    boxable = [(a, t) for a, t in (CORRECT + WRONG)[::6] if a.count("{") == a.count("}")]
    with Grader(RewardConfig(workers=1, timeout_s=60.0)) as grader:
        boxed = grader.grade([_answer(rf"<think>so</think>\boxed{{{a}}}", t) for a, t in boxable])
    tagged = [
        verdict
        for verdict, (text, truth, _) in zip(verdicts, CASES, strict=True)
        if (text, truth) in {(_tagged(a), t) for a, t in boxable}
    ]
    assert [v.kind for v in boxed] == [v.kind for v in tagged]
