"""Mistakes in prompt files, task names, templates and tokenizers end in one sentence that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comppo_mcore.config.schema import ArithmeticConfig, Config, DataConfig, SftConfig
from comppo_mcore.data.dataset import load_dataset, load_examples
from comppo_mcore.data.problems import Message, Problem
from comppo_mcore.data.tokenizer import (
    check_prompt_lengths,
    encode_prompt,
    load_tokenizer,
    make_arithmetic_tokenizer,
)
from comppo_mcore.errors import UserError

GOOD = '{"prompt": "1+1?", "answer": "2"}'


def _config(path: Path | str, **data: Any) -> Config:
    fields = {"source": "file", "path": str(path), "eval_holdout": 1} | data
    return Config(data=DataConfig.model_validate(fields))


def _complaint(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        load_dataset(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["holds no records"]),
        ("\n\n", ["holds no records"]),
        (f"{GOOD}\n{{oops\n", ["line 2", "not valid JSON"]),
        (f"{GOOD}\n\n[1]\n", ["line 3", "JSON list"]),
        (f'{GOOD}\n{{"prompt": "2"}}\n', ["line 2", "no answer", "data.answer_key = 'answer'"]),
        (f'{GOOD}\n{{"prompt": "2", "answer": null}}\n', ["line 2", "no answer"]),
        (f'{GOOD}\n{{"prompt": "2", "answer": "  "}}\n', ["line 2", "no answer"]),
        (f'{GOOD}\n{{"prompt": "2", "answer": true}}\n', ["line 2", "no answer"]),
        (f'{GOOD}\n{{"prompt": "2", "answer": ["1"]}}\n', ["line 2", "no answer"]),
        ('{"question": "2", "answer": "1"}\n', ["line 1", "no prompt", "data.prompt_key = 'prompt'"]),
        ('{"prompt": [], "answer": "1"}\n', ["line 1", "no prompt"]),
        ('{"prompt": [{"role": "user"}], "answer": "1"}\n', ["line 1", "no prompt"]),
        ('{"prompt": [{"role": "system", "content": "x"}], "answer": "1"}\n', ["line 1", "user message"]),
        (f"{GOOD}\n", ["data.eval_holdout = 1", "1 distinct prompts"]),
    ],
)
def test_jsonl_records(tmp_path: Path, content: str, parts: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    message = _complaint(_config(path))
    assert "data.path" in message
    assert all(part in message for part in parts), message
    if "line" in message:
        assert str(path) in message


def test_missing_file_folder_and_wrong_type(tmp_path: Path) -> None:
    assert "is not a file" in _complaint(_config(tmp_path / "none.jsonl"))
    assert "is not a file" in _complaint(_config(tmp_path))
    (tmp_path / "p.csv").write_text("a,b")
    assert "'.csv'" in _complaint(_config(tmp_path / "p.csv"))


def test_unreadable_content(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 this is not parquet")
    for name in ("p.jsonl", "p.parquet"):
        message = _complaint(_config(tmp_path / name))
        assert "data.path" in message
        assert "cannot be read" in message


def test_held_out_file_is_named_by_its_own_field(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n")
    assert "data.eval_path" in _complaint(_config(path, eval_path=str(tmp_path / "none.jsonl")))
    assert "data.eval_path holds every prompt" in _complaint(_config(path, eval_path=str(path)))


def test_nothing_to_evaluate_on(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n")
    assert "data.eval_holdout is 0" in _complaint(_config(path, eval_holdout=0))


def test_template_without_a_place_for_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n")
    assert "data.template = 'Solve {problem}'" in _complaint(_config(path, template="Solve {problem}"))


def test_task_off_the_list() -> None:
    for task, nearest in (("gdc", "gcd"), ("countdown", "count"), ("n_queens", ",")):
        message = _complaint(Config(data=DataConfig(source="reasoning_gym", tasks=(task,))))
        assert f"data.tasks names '{task}'" in message
        assert nearest in message.partition("nearest")[2]


def test_too_few_held_out_problems() -> None:
    data = DataConfig(source="arithmetic", arithmetic=ArithmeticConfig(steps=1))
    with pytest.raises(UserError, match=r"train\.eval_problems is 500.*data\.arithmetic\.steps"):
        load_dataset(Config(data=data)).eval_problems(500)


def test_examples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sft\.path is null"):
        load_examples(Config(data=DataConfig(source="file", path="p.jsonl")))
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"prompt": "1", "response": ""}))
    with pytest.raises(UserError, match=r"sft\.path .* line 1 has no response under sft\.response_key"):
        load_examples(Config(sft=SftConfig(path=str(path))))


def _problem(text: str, role: str = "user") -> Problem:
    return Problem("p.jsonl:7", (Message(role, text),), "1", "p.jsonl")


def test_prompt_longer_than_the_context(tmp_path: Path) -> None:
    prompt = encode_prompt(make_arithmetic_tokenizer(tmp_path), _problem("1+1=?"))
    with pytest.raises(UserError, match=r"prompt p\.jsonl:7 has 5 tokens.* leaves 4 .*data\.path"):
        check_prompt_lengths([prompt], max_prompt_tokens=4)


def test_prompt_the_vocabulary_cannot_spell(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"prompt p\.jsonl:7 cannot be spelled"):
        encode_prompt(tokenizer, _problem("one plus one"))


def test_template_that_refuses_a_role(tmp_path: Path) -> None:
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ raise_exception('users only') }}"
    with pytest.raises(UserError, match=r"refuses the roles \['system'\] \(users only\)"):
        encode_prompt(tokenizer, _problem("1", role="system"))


def test_tokenizer_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path = .* is not a folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"model\.path = .* no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = make_arithmetic_tokenizer(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="EOS"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="without a chat template"):
        load_tokenizer(tmp_path)
