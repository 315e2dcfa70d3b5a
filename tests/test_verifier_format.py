"""Where the answer stands in a response, and what makes a response malformed."""

from __future__ import annotations

import pytest

from comppo_mcore.reward.verifier import parse_response


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1</think><answer>7</answer>", "7"),
        ("<think>1</think>\n<answer>\n 7 \n</answer>\n", "7"),
        ("Well. <think>1</think><answer>7</answer> Bye.", "7"),
        ("<think><answer>8</answer></think><answer>7</answer>", "7"),
        (r"<think>\boxed{8}</think>\boxed{7}", "7"),
        (r"<think></think>\boxed {7}", "7"),
        (r"<think></think>\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<think></think>\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        (r"<think></think>\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"<think></think>\boxed{7} again \boxed{ 7 } and \boxed{8}", "8"),
        (r"<think></think>\boxed{9}<answer>7</answer>", "7"),
    ],
)
def test_answer_is_found(text: str, answer: str) -> None:
    parsed = parse_response(text, finished=True, think_open=False)
    assert parsed.answer == answer
    assert parsed.malformed_reason is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>7</answer>", "think_tags"),
        ("<think>1<answer>7</answer>", "think_tags"),
        ("1</think><answer>7</answer>", "think_tags"),
        ("</think><think><answer>7</answer>", "think_tags"),
        ("<think>1</think>2</think><answer>7</answer>", "think_tags"),
        ("<think><think>1</think><answer>7</answer>", "think_tags"),
        ("<THINK>1</THINK><answer>7</answer>", "think_tags"),
        ("<think>1</think><answer>7", "answer_tags"),
        ("<think>1</think>7</answer>", "answer_tags"),
        ("<think>1</think></answer>7<answer>", "answer_tags"),
        ("<think>1</think><answer>7</answer><answer>8</answer>", "answer_tags"),
        ("<think>1</think><answer> </answer>", "empty"),
        (r"<think>1</think>\boxed{ }", "empty"),
        (r"<think>1</think>\boxed{}\boxed{7}", "empty"),
        (r"<think>1</think>\boxed{7", "box"),
        (r"<think>1</think>\boxed{7 and \boxed{8}", "box"),
        (r"<think>1</think>\boxed{7\}", "box"),
        (r"<think>1</think>\boxed{1}\boxed{2}\boxed{3}", "box"),
        (r"<think>\boxed{7}</think>", "no_answer"),
        (r"<think>1</think>\boxed 7", "no_answer"),
        ("", "think_tags"),
    ],
)
def test_malformed(text: str, reason: str) -> None:
    parsed = parse_response(text, finished=True, think_open=False)
    assert parsed.answer is None
    assert parsed.malformed_reason == reason


def test_a_cut_response_has_no_answer() -> None:
    parsed = parse_response("<think>1</think><answer>7</answer>", finished=False, think_open=False)
    assert (parsed.answer, parsed.malformed_reason) == (None, "truncated")


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1</think><answer>7</answer>", "7"), ("<think>1</think><answer>7</answer>", None), ("7", None)],
)
def test_prompt_that_opened_the_thinking(text: str, answer: str | None) -> None:
    assert parse_response(text, finished=True, think_open=True).answer == answer
