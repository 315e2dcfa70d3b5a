"""The tokenizer and its chat template; and the tiny tokenizer of the arithmetic task."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from comppo_mcore.data.problems import Example, Message, Problem
from comppo_mcore.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
ARITHMETIC_SPECIALS = ("<pad>", "<eos>", THINK, END_THINK, "<answer>", "</answer>")
ARITHMETIC_CHARACTERS = "0123456789+-*=;?"
# The response follows the prompt directly: on a CPU every token of decoration costs time.
ARITHMETIC_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class EncodedPrompt:
    """A problem's prompt as the policy reads it."""

    problem_id: str
    token_ids: tuple[int, ...]
    think_open: bool  # the chat template already opened the thinking


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face model folder, offline.

    Raises:
        UserError: the folder has no tokenizer, or one without a chat template or an EOS token.
    """
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise UserError(f"model.path = '{folder}' is not a folder; give one with a tokenizer in it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path = '{folder}' has no tokenizer that can be loaded ({reason})") from error
    if tokenizer.chat_template is None:
        raise UserError(f"model.path = '{folder}' has a tokenizer without a chat template; add one to it")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path = '{folder}' has a tokenizer without an EOS token; set eos_token in it")
    return tokenizer


def stop_token_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a response, ascending: the tokenizer's EOS and the generation config's.

    Chat models often have several (Qwen3: <|im_end|> and <|endoftext|>).
    """
    stops = {_eos_id(tokenizer)}
    generation_config = Path(folder) / "generation_config.json"
    if generation_config.is_file():
        listed = json.loads(generation_config.read_text(encoding="utf-8")).get("eos_token_id") or []
        stops.update([listed] if isinstance(listed, int) else listed)
    return tuple(sorted(stops))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem | Example) -> EncodedPrompt:
    """Render a problem or an example through the chat template and tokenise it.

    Args:
        tokenizer: as `load_tokenizer` returns it.
        problem: its messages become the prompt.

    Returns:
        Token ids, and whether the rendered prompt ends inside an open `<think>`.

    Raises:
        UserError: the template refuses the messages or the vocabulary cannot spell them.
    """
    text = render(tokenizer, problem.messages)
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(
            f"prompt {problem.id} cannot be spelled by the tokenizer of model.path ({error}); "
            "change data.template or data.system_prompt, or use another tokenizer"
        ) from error
    return EncodedPrompt(problem.id, tuple(token_ids), is_think_open(text))


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Text of a conversation, up to where the response begins.

    Raises:
        UserError: the chat template refuses the messages.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError as error:
        raise UserError(
            f"the chat template of model.path refuses the roles {[message.role for message in messages]} "
            f"({error}); change data.system_prompt or the messages under data.prompt_key"
        ) from error


def is_think_open(prompt: str) -> bool:
    """Whether the last thinking tag of a prompt is an opening one."""
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a response to imitate, EOS included."""
    return (*tokenizer.encode(text, add_special_tokens=False), _eos_id(tokenizer))


def decode_response(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_ids: Collection[int]
) -> str:
    """Text of a response for the verifier: tags kept, the stop token at its end dropped.

    Special tokens inside the response stay visible, so that one that does not belong there spoils the
    format instead of vanishing.
    """
    kept = token_ids[:-1] if token_ids and token_ids[-1] in stop_ids else token_ids
    return str(tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_prompt_lengths(prompts: Iterable[EncodedPrompt], max_prompt_tokens: int) -> None:
    """Refuse prompts that leave no room for the response.

    Args:
        prompts: encoded prompts.
        max_prompt_tokens: context minus the response's share, tokens.

    Raises:
        UserError: names the first prompt that is too long, its length and the limit.
    """
    for prompt in prompts:
        if len(prompt.token_ids) > max_prompt_tokens:
            raise UserError(
                f"prompt {prompt.problem_id} has {len(prompt.token_ids)} tokens, but the context leaves "
                f"{max_prompt_tokens} for a prompt; drop it from data.path, raise model.max_context or "
                "lower rollout.max_response_tokens"
            )


def make_arithmetic_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Write the tokenizer of the arithmetic task: one token per character and per tag.

    Args:
        folder: where the Hugging Face tokenizer files go; made if missing.

    Returns:
        The tokenizer, as `load_tokenizer(folder)` would load it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*ARITHMETIC_SPECIALS, *ARITHMETIC_CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary))  # no unknown token: a foreign character is an error
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in ARITHMETIC_SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = ARITHMETIC_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return load_tokenizer(folder)


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    eos_id = tokenizer.eos_token_id
    assert isinstance(eos_id, int), "load_tokenizer refuses a tokenizer without an EOS token"
    return eos_id
