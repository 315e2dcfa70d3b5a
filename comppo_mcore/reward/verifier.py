"""The format rules: where in a response the answer stands, and which responses have none.

1. The response finished by itself; one cut by the length limit is `truncated`.
2. It holds exactly one `<think>` and, after it, exactly one `</think>`. Where the prompt already
   opened the thinking, it holds no `<think>` and exactly one `</think>`.
3. Only what follows `</think>` is read. If there is an `<answer>` or `</answer>` tag, there must be
   exactly one of each, in order, and the answer is what stands between them. A box in there is opened by
   rule 4, which otherwise reads the whole rest.
4. The answer is the content of the last `\\boxed{…}` or `\\fbox{…}`, braces matched. Any box that is not
   closed, any that is empty, and more than two different ones make the response malformed.
5. An answer is never empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MalformedReason = Literal["truncated", "think_tags", "answer_tags", "box", "empty", "no_answer"]

MAX_DISTINCT_BOXES = 2
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


@dataclass(frozen=True)
class Parsed:
    """The answer of a well-formed response, or why there is none; exactly one is None."""

    answer: str | None
    malformed_reason: MalformedReason | None


def parse_response(text: str, finished: bool, think_open: bool) -> Parsed:
    """Find the answer in a response.

    Args:
        text: the response without its stop token.
        finished: whether it ended with a stop token.
        think_open: whether the prompt already opened the thinking.

    Returns:
        The answer, or the first rule that is broken.
    """
    if not finished:
        return _malformed("truncated")
    conclusion = _after_thinking(text, think_open)
    if conclusion is None:
        return _malformed("think_tags")
    if "<answer>" not in conclusion and "</answer>" not in conclusion:
        return _last_box(conclusion)
    tagged = _between_answer_tags(conclusion)
    if tagged is None:
        return _malformed("answer_tags")
    if _BOX.search(tagged):
        return _last_box(tagged)
    return Parsed(tagged, None) if tagged else _malformed("empty")


def _malformed(reason: MalformedReason) -> Parsed:
    return Parsed(None, reason)


def _after_thinking(text: str, think_open: bool) -> str | None:
    if text.count("<think>") != (0 if think_open else 1) or text.count("</think>") != 1:
        return None
    thinking, conclusion = text.split("</think>")
    return conclusion if think_open or "<think>" in thinking else None


def _between_answer_tags(text: str) -> str | None:
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    start, end = text.index("<answer>") + len("<answer>"), text.index("</answer>")
    return text[start:end].strip() if start <= end else None


def _last_box(text: str) -> Parsed:
    boxes: list[str] = []
    opening = _BOX.search(text)
    while opening:
        end = _closing_brace(text, opening.end())
        if end is None:
            return _malformed("box")
        boxes.append(text[opening.end() : end].strip())
        opening = _BOX.search(text, end)
    if not boxes:
        return _malformed("no_answer")
    if "" in boxes:
        return _malformed("empty")
    if len({"".join(box.split()) for box in boxes}) > MAX_DISTINCT_BOXES:
        return _malformed("box")
    return Parsed(boxes[-1], None)


def _closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes a group begun before `start`; `\{` and `\}` do not count."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return start + brace.start()
    return None
