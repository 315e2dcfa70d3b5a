"""The endpoints of one SGLang server, and everything that is checked about its replies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comppo_mcore.errors import UserError
from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang.http import Broken, Connection, Refused, ServerError, Unreachable

UNKNOWN_VERSION = -1  # of a server to which no trainer has given weights
MASK_TOP_K = (
    4096  # SGLang returns supports of at most so many ids; then top-k belongs to the behaviour policy
)
INFO_TIMEOUT_S = 30.0
POLL_S = 0.5
SETTLE_S = 5.0  # SGLang answers a request a step or so before its scheduler is done with it

Memory = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself."""

    model_path: str  # as the server sees it
    model_type: str  # of the HF config
    tp_size: int
    weight_version: int
    sglang: str  # release
    max_context: int  # tokens of prompt + response that one request may have
    dtype: str


@dataclass(frozen=True)
class Generated:
    """One response. A response that ends with a stop token keeps it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, log_softmax(z/T) over the whole vocabulary, before top-k and top-p
    finish: Literal["stop", "length", "abort"]
    versions: tuple[int, ...]  # of the weights, per token
    supports: tuple[tuple[int, ...], ...] | None = (
        None  # per token, the ids it was drawn from; with mask=True
    )


class Server:
    """One server. Generation and questions are retried (`http.Connection.retried`), orders never.

    Args:
        url: such as http://10.0.0.7:30000.
        vocab_size: of the model; SGLang 0.5.23 dies of an id beyond it, so that none is sent.
        request_timeout_s: of one generation, its retries included.
        sync_timeout_s: of each order: pausing, flushing, memory, weights.
    """

    def __init__(self, url: str, *, vocab_size: int, request_timeout_s: float, sync_timeout_s: float) -> None:
        self._connection = Connection(url)
        self.url = self._connection.url
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._max_context: int | None = None  # asked for once: it does not change while a server runs

    async def wait_ready(self, timeout_s: float) -> None:
        """Until the server has generated a token.

        Raises:
            Unreachable: not within `timeout_s`; the message ends with the last failure.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                left = max(deadline - loop.time(), 0.01)
                await self._connection.once("GET", "/health", timeout_s=left)
                return
            except ServerError as error:
                if loop.time() + POLL_S >= deadline:
                    raise Unreachable(f"{self.url} is not ready after {timeout_s:g} s: {error}") from error
            await asyncio.sleep(POLL_S)

    async def info(self) -> ServerInfo:
        """Answered also while generation is paused, which `/health` is not.

        Raises:
            ServerError: no reply, or one that lacks what SGLang's has.
        """
        timeout_s = min(INFO_TIMEOUT_S, self._request_timeout_s)
        model = await self._connection.retried("GET", "/model_info", timeout_s=timeout_s)
        server = await self._connection.retried("GET", "/server_info", timeout_s=timeout_s)
        try:
            info = ServerInfo(
                model_path=str(model["model_path"]),
                model_type=str(model["model_type"]),
                tp_size=int(server["tp_size"]),
                weight_version=parse_version(model["weight_version"]),
                sglang=str(server["version"]),
                max_context=int(server["max_req_input_len"]) + 4,  # the scheduler keeps 6 tokens back, not 2
                dtype=str(server["dtype"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Broken(f"{self.url}/server_info: not the reply of an SGLang server ({error!r})") from error
        self._max_context = info.max_context
        return info

    async def weight_version(self, *, timeout_s: float) -> int:
        """The version it labels tokens with; the cheapest question that shows a server alive."""
        model = await self._connection.retried("GET", "/model_info", timeout_s=timeout_s)
        if not isinstance(model, dict) or "weight_version" not in model:
            raise Broken(f"{self.url}/model_info: no weight_version in the reply")
        return parse_version(model["weight_version"])

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        seed: int | None = None,
        mask: bool = False,
    ) -> Generated:
        """One response.

        Args:
            token_ids: the prompt.
            rid: the request's id, for `abort`; further attempts append `.1`, `.2` ….
            seed: used by servers started with --enable-deterministic-inference, ignored by others.
            mask: also return the ids each token was drawn from; truncates to the 4096 likeliest ids.

        Raises:
            ValueError: ids outside the vocabulary or too many tokens; nothing has been sent.
            ServerError: no usable reply.
        """
        if self._max_context is None:
            await self.info()
        self._check(token_ids, sampling)
        request = _request(token_ids, sampling, seed, mask)

        def body(attempt: int) -> dict[str, Any]:
            # A server may still be at work on an attempt whose connection broke, and ids must not repeat.
            return {**request, "rid": rid if attempt == 0 else f"{rid}.{attempt}"}

        reply = await self._connection.retried("POST", "/generate", body, timeout_s=self._request_timeout_s)
        try:
            generated = parse_generated(reply, mask)
            _check_generated(generated, sampling, self._vocab_size)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Broken(f"POST {self.url}/generate: a reply that makes no sense ({error!r})") from error
        self._check_stop(generated, sampling)
        return generated

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log_softmax(z) of every token but the first, nats.

        Raises:
            ValueError: ids outside the vocabulary or too many; nothing has been sent.
            ServerError: no usable reply.
        """
        if self._max_context is None:
            await self.info()
        one_token = Sampling(max_tokens=1)
        self._check(token_ids, one_token)
        request = {**_request(token_ids, one_token, None, mask=False), "logprob_start_len": 0}
        reply = await self._connection.retried(
            "POST", "/generate", lambda attempt: request, timeout_s=self._sync_timeout_s
        )
        try:
            scored = reply["meta_info"]["input_token_logprobs"][1:]  # the first token has no log-prob
            last = self._vocab_size - 1  # SGLang 0.5.23 reports it as 0, as it does images
            told = [0 if token == last else token for token in token_ids[1:]]
            if [entry[1] % last for entry in scored] != told:
                raise ValueError("log-probs of other tokens than input_ids")
            return [float(entry[0]) for entry in scored]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Broken(f"POST {self.url}/generate: a reply that makes no sense ({error!r})") from error

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ValueError(f"the prompt is empty or has a token id outside [0, {self._vocab_size})")
        if sampling.stop_ids and not 0 <= min(sampling.stop_ids) <= max(sampling.stop_ids) < self._vocab_size:
            raise ValueError(f"a stop id is outside [0, {self._vocab_size}): {sampling.stop_ids}")
        assert self._max_context is not None
        if len(token_ids) + sampling.max_tokens > self._max_context:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and {sampling.max_tokens} response tokens are more than the "
                f"{self._max_context} that {self.url} has room for"
            )

    def _check_stop(self, generated: Generated, sampling: Sampling) -> None:
        if generated.finish == "stop" and generated.token_ids[-1] not in sampling.stop_ids:
            raise UserError(
                f"model.path: {self.url} ended a response with token {generated.token_ids[-1]}, an "
                f"eos_token_id of config.json that is not among the stop tokens {list(sampling.stop_ids)} of "
                "the tokenizer and generation_config.json; make the files agree"
            )

    async def pause(self, mode: Literal["abort", "retract"]) -> None:
        """Stop generating. `abort` ends what runs; `retract` keeps it, to go on with a new cache."""
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them: their replies come at once with the tokens they have."""
        await self.post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def flush(self) -> None:
        """Forget all keys and values. Refused while a request runs, unless it ends within `SETTLE_S`."""
        try:
            await self.post("/flush_cache", None)
        except Refused:  # waiting from the start would be in vain under `retract`, where requests stay
            await self.post(f"/flush_cache?timeout={SETTLE_S}", None)

    async def release_memory(self, tags: Sequence[Memory]) -> None:
        """Give GPU memory back until `resume_memory`. Refused while a request runs: it would be fatal."""
        await self.flush()  # takes place only where nothing runs
        await self.post("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[Memory]) -> None:
        await self.post("/resume_memory_occupation", {"tags": list(tags)})

    async def begin_update(self) -> None:
        """Open a weight update; a server too old for the protocol (before 0.5.21) needs none."""
        await self._post_if_known("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        await self._post_if_known("/end_weight_update", {})

    async def _post_if_known(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            await self.post(path, body)
        except Refused as error:
            if error.status != 404:
                raise

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        """An order, sent once; None: `sync_timeout_s`."""
        return await self._connection.once("POST", path, body, timeout_s=timeout_s or self._sync_timeout_s)

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self._connection.once("GET", path, timeout_s=timeout_s or self._sync_timeout_s)

    async def aclose(self) -> None:
        await self._connection.aclose()


def parse_version(text: object) -> int:
    """Versions are the trainer's integers, in decimal; anything else ("default") is unknown."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else UNKNOWN_VERSION


def _request(token_ids: Sequence[int], sampling: Sampling, seed: int | None, mask: bool) -> dict[str, Any]:
    return {
        "input_ids": [int(token) for token in token_ids],
        "sampling_params": sampling_params(sampling, seed, mask),
        "return_logprob": True,
        "return_sampling_mask": mask,
    }


def sampling_params(sampling: Sampling, seed: int | None, mask: bool) -> dict[str, Any]:
    """SGLang's words for `sampling`, all of them, because a server can have defaults of its own.

    Raises:
        ValueError: greedy at a temperature other than 1, where SGLang scores at z or at z/T, as its batch
            happens to be.
    """
    if sampling.greedy and sampling.temperature != 1:
        raise ValueError(f"greedy needs temperature 1, got {sampling.temperature}")
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": 1 if sampling.greedy else MASK_TOP_K if mask else -1,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,  # it would make SGLang ignore stop_token_ids too
        **({} if seed is None else {"sampling_seed": seed}),
    }


def parse_generated(reply: Any, mask: bool) -> Generated:
    """A reply of /generate. An aborted request that had not begun has no list of log-probs."""
    meta = reply["meta_info"]
    scored = meta.get("output_token_logprobs") or []
    token_ids = tuple(int(token) for token in reply["output_ids"])
    if [entry[1] for entry in scored] != list(token_ids):
        raise ValueError("log-probs of other tokens than output_ids")
    supports = None
    if mask:
        supports = tuple(tuple(ids) for ids in meta.get("output_token_sampling_mask") or [])
    return Generated(
        token_ids=token_ids,
        logprobs=tuple(float(entry[0]) for entry in scored),
        finish=meta["finish_reason"]["type"],
        versions=_token_versions(meta, len(token_ids)),
        supports=supports,
    )


def _token_versions(meta: Mapping[str, Any], num_tokens: int) -> tuple[int, ...]:
    """Spans {version, start, end} → one version per token; a server too old for spans has one for all."""
    spans = meta.get("weight_versions")
    if spans is None:
        return (parse_version(meta["weight_version"]),) * num_tokens
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions do not follow each other: {spans}")
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    return tuple(versions)


def _check_generated(generated: Generated, sampling: Sampling, vocab_size: int) -> None:
    count = len(generated.token_ids)
    if generated.finish not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {generated.finish!r}")
    if count > sampling.max_tokens or (generated.finish == "length" and count < sampling.max_tokens):
        raise ValueError(f"{count} tokens of {sampling.max_tokens}, finish_reason {generated.finish!r}")
    if generated.finish == "stop" and count == 0:
        raise ValueError("stopped without a token")
    if len(generated.versions) != count:
        raise ValueError(f"weight_versions of {len(generated.versions)} of {count} tokens")
    if any(not 0 <= token < vocab_size for token in generated.token_ids):
        raise ValueError(f"a token outside [0, {vocab_size})")
    if any(not math.isfinite(value) or value > 1e-4 for value in generated.logprobs):
        raise ValueError("a log-prob that is none")
    if generated.supports is not None:
        _check_supports(generated.token_ids, generated.supports)


def _check_supports(token_ids: Sequence[int], supports: Sequence[Sequence[int]]) -> None:
    if len(supports) != len(token_ids):
        raise ValueError(f"sampling masks of {len(supports)} of {len(token_ids)} tokens")
    if any(token not in support for token, support in zip(token_ids, supports, strict=True)):
        raise ValueError("a token outside its own sampling mask")
