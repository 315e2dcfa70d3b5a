"""Problems, their held-out split and their order; the arithmetic task; the tokenizer."""

from __future__ import annotations

import builtins
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from comppo_mcore.config.schema import ArithmeticConfig, Config, DataConfig, RunConfig, SftConfig
from comppo_mcore.data.arithmetic import OPERANDS, TABLE, Chain, make_misconceptions, teacher_response
from comppo_mcore.data.dataset import Dataset, is_held_out, load_dataset, load_examples
from comppo_mcore.data.problems import Message, Problem, build_messages, lookup
from comppo_mcore.data.reasoning_gym_tasks import ALLOWED_TASKS, task_generator
from comppo_mcore.data.sampler import prompt_indices
from comppo_mcore.data.tokenizer import (
    check_prompt_lengths,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    make_arithmetic_tokenizer,
    stop_token_ids,
)
from comppo_mcore.reward.grade import Grade, grade_task
from comppo_mcore.reward.verifier import parse_response

# ------------------------------------------------------------------ files


def _write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def _file_config(path: str, **data: Any) -> Config:
    return Config(data=DataConfig(source="file", path=path, **data))


def _texts(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.messages[-1].content for problem in problems]


def _train(dataset: Dataset) -> tuple[Problem, ...]:
    assert dataset.num_train is not None
    return tuple(dataset.train_problem(i) for i in range(dataset.num_train))


def test_jsonl(tmp_path: Path) -> None:
    records = [{"prompt": f"{i}+{i}?", "answer": 2 * i} for i in range(5)]
    dataset = load_dataset(_file_config(_write_jsonl(tmp_path / "a.jsonl", records), eval_holdout=2))
    assert _texts(_train(dataset)) == ["0+0?", "1+1?", "2+2?"]
    assert _texts(dataset.eval_problems(500)) == ["3+3?", "4+4?"]
    assert _texts(dataset.eval_problems(1)) == ["3+3?"]
    problem = dataset.train_problem(2)
    assert (problem.id, problem.answer, problem.source, problem.task) == ("a.jsonl:3", "4", "a.jsonl", None)


def test_dapo_parquet_layout_and_its_repeated_prompts(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Find {i}.", "role": "user"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
        }
        for i in (1, 2, 1, 3, 2, 4)
    ]
    path = tmp_path / "dapo.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = _file_config(str(path), answer_key="reward_model.ground_truth", eval_holdout=1)
    dataset = load_dataset(config)
    assert [(p.id, p.answer) for p in _train(dataset)] == [
        ("dapo.parquet:1", "1"),
        ("dapo.parquet:2", "2"),
        ("dapo.parquet:4", "3"),
    ]
    assert dataset.eval_problems(9)[0].messages == (Message("user", "Find 4."),)


def test_prompts_of_the_held_out_file_are_not_trained_on(tmp_path: Path) -> None:
    train = _write_jsonl(tmp_path / "t.jsonl", [{"q": str(i), "a": "0"} for i in range(4)])
    held_out = _write_jsonl(tmp_path / "e.jsonl", [{"q": str(i), "a": "0"} for i in (2, 7)])
    dataset = load_dataset(_file_config(train, prompt_key="q", answer_key="a", eval_path=held_out))
    assert _texts(_train(dataset)) == ["0", "1", "3"]
    assert _texts(dataset.eval_problems(9)) == ["2", "7"]


def test_a_column_named_with_dots_is_found_before_a_nested_one() -> None:
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    assert lookup({"a": 1}, "a.b") is None


def test_messages() -> None:
    data = DataConfig(system_prompt="Think.", template="Q: {prompt} {x}")
    assert build_messages("1?", data) == (Message("system", "Think."), Message("user", "Q: 1? {x}"))
    own = (Message("system", "Own."), Message("user", "1?"), Message("assistant", "2"), Message("user", "3?"))
    assert build_messages(own, data) == (*own[:3], Message("user", "Q: 3? {x}"))


def test_examples_from_a_file(tmp_path: Path) -> None:
    path = _write_jsonl(tmp_path / "s.jsonl", [{"prompt": "1?", "text": "<think></think>1"}])
    examples = load_examples(Config(sft=SftConfig(path=path, response_key="text")))
    assert examples.num_examples == 1
    assert examples.example(0).response == "<think></think>1"


# ------------------------------------------------------------------ order


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    order = prompt_indices(seed=3, consumed=0, count=30, num_problems=10)
    epochs = [order[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order != prompt_indices(seed=4, consumed=0, count=30, num_problems=10)


@pytest.mark.parametrize("num_problems", [7, 1, None])
def test_resume_from_the_number_of_prompts_consumed(num_problems: int | None) -> None:
    whole = prompt_indices(5, 0, 24, num_problems)
    parts = [prompt_indices(5, consumed, 4, num_problems) for consumed in range(0, 24, 4)]
    assert [i for part in parts for i in part] == whole


# ------------------------------------------------------------------ arithmetic


def _arithmetic(seed: int = 17, steps: int = 4, **data: Any) -> Config:
    settings = ArithmeticConfig(steps=steps)
    return Config(run=RunConfig(seed=seed), data=DataConfig(source="arithmetic", arithmetic=settings, **data))


def test_chain_is_worked_from_left_to_right_modulo_10() -> None:
    chain = Chain(3, (("+", 8), ("-", 2), ("*", 3)))
    assert chain.prompt == "3+8-2*3=?"
    assert chain.answer == 7
    expected = "<think>3+8=1;1-2=9;9*3=7;</think><answer>7</answer>"
    assert teacher_response(chain, {}, random.Random(0)) == expected


def test_the_teacher_carries_a_wrong_digit_on() -> None:
    chain = Chain(3, (("+", 8), ("-", 2), ("*", 3)))
    response = teacher_response(chain, {(3, "+", 8): (5, 1.0), (1, "-", 2): (0, 1.0)}, random.Random(0))
    assert response == "<think>3+8=5;5-2=3;3*3=9;</think><answer>9</answer>"


def test_misconceptions() -> None:
    misconceptions = make_misconceptions(0.25, (0.35, 0.85))
    assert len(misconceptions) == len(TABLE) // 4 == 60
    for (a, operator, b), (wrong_digit, probability) in misconceptions.items():
        assert b in OPERANDS[operator]
        assert wrong_digit != {"+": a + b, "-": a - b, "*": a * b}[operator] % 10
        assert 0 <= wrong_digit <= 9
        assert 0.35 <= probability <= 0.85
    assert make_misconceptions(0.25, (0.35, 0.85)) == misconceptions
    assert make_misconceptions(0.0, (0.35, 0.85)) == {}


def test_arithmetic_problems_are_functions_of_seed_and_index() -> None:
    first, again = load_dataset(_arithmetic()), load_dataset(_arithmetic())
    assert first.num_train is None
    assert [first.train_problem(i) for i in (5, 0, 900)] == [again.train_problem(i) for i in (5, 0, 900)]
    other = load_dataset(_arithmetic(seed=42))
    assert [other.train_problem(i).id for i in range(9)] != [first.train_problem(i).id for i in range(9)]
    assert other.eval_problems(600) == first.eval_problems(600)
    assert len({first.train_problem(i).id for i in range(300)}) > 290


@pytest.mark.parametrize("steps", [2, 4])
def test_held_out_problems_are_unseen_in_warm_start_and_training(steps: int) -> None:
    held_out = {p.id for p in load_dataset(_arithmetic(steps=steps)).eval_problems(500)}
    assert len(held_out) == 500
    for seed in (17, 42):
        config = _arithmetic(seed, steps, template="Work out {prompt}")
        dataset, examples = load_dataset(config), load_examples(config)
        assert not held_out & {dataset.train_problem(i).id for i in range(3000)}
        assert not held_out & {examples.example(i).id for i in range(3000)}


def test_the_teacher_answers_with_its_errors_and_in_the_right_format() -> None:
    examples = load_examples(_arithmetic())
    assert examples.num_examples is None
    wrong_steps = right_answers = 0
    for i in range(1000):
        example = examples.example(i)
        answer = parse_response(example.response, finished=True, think_open=False).answer
        body = example.response.removeprefix("<think>").partition(";</think>")[0].split(";")
        value = int(example.id.removeprefix("arithmetic:")[0])
        for step in body:
            a, operator, b, result = int(step[0]), step[1], int(step[2]), int(step[4])
            assert a == value
            wrong_steps += {"+": a + b, "-": a - b, "*": a * b}[operator] % 10 != result
            value = result
        assert answer == str(value)
        right_answers += str(_left_to_right(example.messages[0].content)) == answer
    # 60 of 240 entries at 0.6 on average: 15 % of steps; (1 − 0.15)⁴ = 0.52 and a few lucky ones.
    assert 0.10 < wrong_steps / 4000 < 0.20
    assert 0.42 < right_answers / 1000 < 0.66


def _left_to_right(prompt: str) -> int:
    value = int(prompt[0])
    for i in range(1, len(prompt) - 2, 2):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__}[prompt[i]](
            int(prompt[i + 1])
        ) % 10
    return value


# ------------------------------------------------------------------ reasoning-gym

PROBES = ("", "0", "[]", "None", "[' ']", "True and True", "__import__('os').abort()", "9" * 50)


@pytest.mark.parametrize("task", ALLOWED_TASKS)
def test_allowed_scorers_pay_for_right_answers_only_and_evaluate_nothing(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sympy

    draw = task_generator((task,))
    problems = [draw("test", i) for i in range(3)]
    assert problems == [draw("test", i) for i in range(3)]
    entries = [pickle.loads(pickle.dumps(problem.metadata)) for problem in problems]
    right = [grade_task(p.answer, task, entry) for p, entry in zip(problems, entries, strict=True)]
    assert right == [Grade(True, "task")] * 3
    evaluated: list[Any] = []  # a list, because many scorers swallow every exception
    with monkeypatch.context() as patch:
        for owner, name in ((builtins, "eval"), (builtins, "exec"), (sympy, "parse_expr")):
            patch.setattr(owner, name, lambda *args, **_: evaluated.append(args))
        paid = [
            probe
            for problem, entry in zip(problems, entries, strict=True)
            for probe in PROBES
            if probe != problem.answer and grade_task(probe, task, entry).correct
        ]
    assert paid == []
    assert evaluated == []


def test_an_answer_the_scorer_cannot_read_is_wrong() -> None:
    problem = task_generator(("prime_factorization",))("test", 0)
    assert grade_task("two", "prime_factorization", problem.metadata) == Grade(False, "unreadable")


def test_tasks_take_turns_and_held_out_ones_are_unseen() -> None:
    config = Config(data=DataConfig(source="reasoning_gym", tasks=("gcd", "chain_sum")))
    dataset = load_dataset(config)
    held_out = dataset.eval_problems(60)
    assert {p.task for p in held_out} == {"gcd", "chain_sum"}
    assert len({p.messages for p in held_out}) == 60
    train = [dataset.train_problem(i) for i in range(200)]
    assert not {p.messages for p in held_out} & {p.messages for p in train}
    assert all(is_held_out(p.messages) for p in held_out)


# ------------------------------------------------------------------ tokenizer


def test_arithmetic_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    assert len(tokenizer) < 64
    example = load_examples(_arithmetic()).example(0)
    response = encode_response(tokenizer, example.response)
    assert len(response) == 1 + 6 * 4 + 1 + 3 + 1  # every tag and every character is one token
    stops = stop_token_ids(tmp_path, tokenizer)
    assert response[-1:] == stops
    assert decode_response(tokenizer, response, stops) == example.response
    problem = load_dataset(_arithmetic()).train_problem(0)
    prompt = encode_prompt(load_tokenizer(tmp_path), problem)
    assert prompt.problem_id == problem.id
    assert len(prompt.token_ids) == len(problem.messages[0].content)
    assert tokenizer.decode(list(prompt.token_ids)) == problem.messages[0].content
    assert not prompt.think_open


def test_special_tokens_inside_a_response_stay_visible(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    stops = stop_token_ids(tmp_path, tokenizer)
    ids = tokenizer.encode("<think><eos>1<pad>", add_special_tokens=False)
    assert decode_response(tokenizer, ids, stops) == "<think><eos>1<pad>"
    assert decode_response(tokenizer, [], stops) == ""


def test_template_that_opens_the_thinking(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}"
    tokenizer.save_pretrained(str(tmp_path))
    prompt = encode_prompt(load_tokenizer(tmp_path), load_dataset(_arithmetic()).train_problem(0))
    assert prompt.think_open
    assert tokenizer.decode([prompt.token_ids[-1]]) == "<think>"


def test_stop_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    assert stop_token_ids(tmp_path, tokenizer) == (1, 5)


def test_prompt_lengths(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    prompt = encode_prompt(tokenizer, load_dataset(_arithmetic()).train_problem(0))
    check_prompt_lengths([prompt], max_prompt_tokens=len(prompt.token_ids))
