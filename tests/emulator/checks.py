"""What a correct kernel passes: named checks per op, each on every warp order it is asked for.

A check runs one problem on a device, compares it with the oracle and hands back all outputs, so that the
caller can also demand the same bits under another warp order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tests.emulator import oracles
from tests.emulator.device import OPTIONAL, Arrays, AttentionInputs, Device, make_plan

Check = Callable[[Device], Arrays]


def assert_close(got: np.ndarray, want: np.ndarray, *, rtol: float, scale: float, what: str) -> None:
    """|got − want| ≤ rtol · (|want| + scale), NaN nowhere."""
    error = np.abs(got.astype(np.float64) - want)
    bound = rtol * (np.abs(want) + scale)
    worst = (
        np.unravel_index(np.argmax(np.nan_to_num(error - bound, nan=np.inf)), error.shape)
        if error.size
        else ()
    )
    assert (error <= bound).all(), f"{what}{list(worst)}: {got[worst]} is not {want[worst]}"


# --- Comp-GAE


def comp_gae(
    device: Device,
    lengths: tuple[int, ...],
    gaps: str,
    share_of_gaps: float,
    *,
    lam: float = 0.95,
    bootstrap: bool = False,
) -> Arrays:
    generator = np.random.default_rng(len(lengths) + sum(lengths))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(cu_seqlens[-1])
    mask = generator.random(n) >= share_of_gaps
    rewards, values = generator.normal(size=(2, n)).astype(np.float32)
    kappa = generator.uniform(0.2, 1.0, n).astype(np.float32)
    poisoned = (values, kappa) if gaps == "compact" else (values, kappa, rewards)
    for array in poisoned:
        array[~mask] = np.nan  # never read
    v_end = generator.normal(size=len(lengths)).astype(np.float32) if bootstrap else None
    arguments = (rewards, values, kappa, mask, cu_seqlens)
    got = device.comp_gae(*arguments, lam=lam, gaps=gaps, bootstrap=v_end)
    want = oracles.comp_gae(*arguments, lam=lam, gaps=gaps, bootstrap=v_end)
    for name, array in got.items():
        assert_close(array, want[name], rtol=2e-6, scale=4.0, what=name)
        assert not array[~mask].any(), f"{name} is not 0 outside the mask"
    return got


COMP_GAE: dict[str, Check] = {
    "one_chunk": partial(comp_gae, lengths=(5, 64, 1), gaps="compact", share_of_gaps=0.0),
    "no_gaps_many_chunks": partial(
        comp_gae, lengths=(1300, 0, 511, 512, 513), gaps="compact", share_of_gaps=0.0
    ),
    "compact": partial(comp_gae, lengths=(700, 3, 1100), gaps="compact", share_of_gaps=0.5),
    "compact_mostly_gaps": partial(comp_gae, lengths=(1600, 40), gaps="compact", share_of_gaps=0.995),
    "leading_gaps": partial(comp_gae, lengths=(9, 80, 300), gaps="compact", share_of_gaps=0.9),
    "compact_bootstrap": partial(
        comp_gae, lengths=(600, 9), gaps="compact", share_of_gaps=0.3, bootstrap=True
    ),
    "cut": partial(comp_gae, lengths=(700, 3, 1100), gaps="cut", share_of_gaps=0.2),
    "cut_bootstrap": partial(
        comp_gae, lengths=(30, 600, 2, 2, 2), gaps="cut", share_of_gaps=0.5, bootstrap=True
    ),
    "no_valid_token": partial(comp_gae, lengths=(520, 1), gaps="compact", share_of_gaps=1.0),
    "empty": partial(comp_gae, lengths=(0, 0), gaps="cut", share_of_gaps=0.0),
    "long_trace": partial(comp_gae, lengths=(2100,), gaps="compact", share_of_gaps=0.1, lam=1.0),
}


# --- pooling


def pooling_inputs(
    num_rows: int, num_keys: int, top_k: int, width: int, out_width: int, dtype: type, hot: float
) -> Arrays:
    """Rows of two sequences; a share `hot` of all edges meets at the first key of each."""
    generator = np.random.default_rng(num_rows + width)
    half = num_keys // 2
    index = generator.integers(-1, half, (num_rows, top_k)).astype(np.int32)
    index[generator.random(index.shape) < hot] = 0
    weight = generator.random(index.shape)
    weight[index < 0] = np.nan  # padding is selected away
    x = {
        "query_beta": generator.normal(size=(num_rows, width)),
        "query_rel": generator.normal(size=(num_rows, width)),
        "key_features": generator.normal(size=(num_keys, 2 * width + out_width)),
        "weight": weight,
    }
    return {n: a.astype(dtype) for n, a in x.items()} | {
        "index": index,
        "seq_start": np.where(np.arange(num_rows) % 3 == 0, half, 0).astype(np.int64),
    }


def pooling(
    device: Device,
    num_rows: int,
    num_keys: int = 40,
    *,
    top_k: int,
    width: int,
    out_width: int,
    dtype: type = np.float32,
    hot: float = 0.1,
    backward: bool = True,
    dead: bool = False,
) -> Arrays:
    x = pooling_inputs(num_rows, num_keys, top_k, width, out_width, dtype, hot)
    if dead:
        x["query_rel"][::2] = 0
        x["index"][1::4] = -1
    generator = np.random.default_rng(1)
    grads = None
    if backward:
        shapes = {"pooled": (num_rows, out_width), "score_sum": (num_rows,)}
        grads = {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
        grads["pooled"][x["index"].max(1, initial=-1) < 0] *= 0 if dead else 1
        if dead:
            grads["pooled"][::2] = 0  # dead rows: the caller puts something else in place of pooled
    got = device.pool_history(x, grads=grads)
    want = oracles.pool_history(x, grads=grads)
    rtol = 1e-13 if dtype == np.float64 else 2e-6
    for name, array in got.items():
        scale = float(np.abs(want[name]).max(initial=0)) if "grad" in name else 4.0
        assert_close(array, want[name], rtol=4 * rtol, scale=scale, what=name)
    return got


POOL_HISTORY: dict[str, Check] = {
    "float64": partial(pooling, num_rows=9, top_k=6, width=5, out_width=7, dtype=np.float64),
    "two_batches": partial(pooling, num_rows=11, top_k=64, width=20, out_width=33),
    "wide": partial(pooling, num_rows=9, top_k=33, width=130, out_width=260),
    "one_edge": partial(pooling, num_rows=3, top_k=1, width=1, out_width=1),
    "no_edges": partial(pooling, num_rows=3, top_k=0, width=8, out_width=8),
    "no_rows": partial(pooling, num_rows=0, top_k=4, width=8, out_width=8),
    "hot_key": partial(pooling, num_rows=90, top_k=8, width=4, out_width=6, hot=0.7),
    "dead_rows": partial(pooling, num_rows=17, top_k=5, width=6, out_width=5, dead=True),
    "forward_alone": partial(pooling, num_rows=40, top_k=12, width=16, out_width=24, backward=False),
}


# --- attention statistics

ULP = 2.0**-23


@dataclass(frozen=True)
class Attention:
    """Packed sequences of random queries and keys."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    heads: int = 4
    groups: int = 1
    width: int = 64
    dtype: str = "bfloat16"
    history: str = "all"
    skip_first: int = 0
    window: int | None = None
    top_k: int = 64
    given_lse: bool = True
    slack: int = 0
    last_rows: int | None = None  # of each sequence, in place of all response rows
    shuffled: bool = False
    seed: int = 0
    keys_per_item: int = 2048
    wanted: tuple[str, ...] = OPTIONAL
    renyi_alpha: float = 3.0
    mass_top_k: int = 8
    capability: int = 80

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def rows(self) -> np.ndarray:
        cu, n = self.cu_seqlens, self.last_rows
        firsts = [
            (cu[b] + max(p - 1, 0) if n is None else max(cu[b], cu[b + 1] - n))
            for b, p in enumerate(self.prompts)
        ]
        rows = np.concatenate([np.arange(f, cu[b + 1]) for b, f in enumerate(firsts)])
        return np.random.default_rng(self.seed).permutation(rows) if self.shuffled else rows


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 → what the device is given; 16-bit types as their bits."""
    if dtype == "float32":
        return x.astype(np.float32)
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def exact(x: np.ndarray, dtype: str) -> np.ndarray:
    """What the device is given → its value, float64."""
    if dtype == "float16":
        return x.view(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


@dataclass(frozen=True)
class Posed:
    """A problem with its oracle: a per row, and where I_t begins."""

    inputs: AttentionInputs
    weights: list[np.ndarray]
    yardstick: list[np.ndarray]  # the same in float32
    history_from: np.ndarray


def pose(case: Attention, q: np.ndarray, k: np.ndarray, scale: float, lse: np.ndarray | None = None) -> Posed:
    """q [rows, heads, d] and k [keys, groups, d] as the device gets them; `lse` replaces the true one."""
    rows, cu, scale = case.rows(), case.cu_seqlens, float(np.float32(scale))
    history_from, visible_from = oracles.history_range(
        rows, cu, np.array(case.prompts), case.history, case.skip_first, case.window
    )
    start = cu[np.searchsorted(cu, rows, side="right") - 1]
    keys = oracles.VisibleKeys(start, rows - start, visible_from)
    exact_q, exact_k = exact(q, case.dtype), exact(k, case.dtype)
    if lse is None:
        lse = oracles.log_denominators(exact_q, exact_k, keys, scale)
    given = lse.astype(np.float32) if case.given_lse else None
    plan = make_plan(rows, cu, history_from, visible_from, case.keys_per_item)
    inputs = AttentionInputs(case.dtype, q, k, given, rows, plan, scale, case.slack)
    single_q, single_k = exact_q.astype(np.float32), exact_k.astype(np.float32)
    single_lse = given
    if single_lse is None:
        single_lse = oracles.log_denominators(single_q, single_k, keys, scale)
    return Posed(
        inputs,
        oracles.attention_rows(exact_q, exact_k, lse if given is None else given, keys, scale),
        oracles.attention_rows(single_q, single_k, single_lse, keys, scale),
        history_from,
    )


def random_problem(case: Attention) -> Posed:
    generator = np.random.default_rng(case.seed)
    q = 2 * generator.normal(size=(len(case.rows()), case.heads, case.width))
    k = generator.normal(size=(sum(case.lengths), case.groups, case.width))
    return pose(case, round_to(q, case.dtype), round_to(k, case.dtype), case.width**-0.5)


def run_attention(device: Device, case: Attention, posed: Posed) -> Arrays:
    device.capability = case.capability
    return device.attention_statistics(
        posed.inputs,
        top_k=case.top_k,
        wanted=case.wanted,
        renyi_alpha=case.renyi_alpha,
        mass_top_k=case.mass_top_k,
    )


def attention(device: Device, case: Attention) -> Arrays:
    """Sums to twice the error of plain float32 plus 4 ulp; the top-K to 1e-6 of the K-th weight.

    16-bit elements get twice that, because their log-denominators are rounded once more. Twice what torch
    errs in 16 bits would be the wanted bound, and is orders of magnitude wider.
    """
    posed = random_problem(case)
    got = run_attention(device, case, posed)
    options = {"renyi_alpha": case.renyi_alpha, "mass_top_k": case.mass_top_k, "envelope": (0.1, 0.9, 4.0)}
    want = oracles.row_statistics(posed.weights, posed.history_from, **options)
    plain = oracles.row_statistics(posed.yardstick, posed.history_from, **options)
    slack = 1 if case.dtype == "float32" else 2
    for name in ("mass", "sum_squares", *case.wanted):
        allowed = slack * (2 * np.abs(plain[name] - want[name]).max(initial=0) + 4 * ULP * np.abs(want[name]))
        error = np.abs(got[name] - want[name])
        worst = int(np.argmax(np.nan_to_num(error - allowed, nan=np.inf))) if len(error) else 0
        assert (error <= allowed).all(), f"{name}[{worst}]: {got[name][worst]} is not {want[name][worst]}"
    for r, weights in enumerate(posed.weights):
        assert_top_k(got["index"][r], got["weight"][r], weights, int(posed.history_from[r]))
    return got


def assert_top_k(index: np.ndarray, weight: np.ndarray, a: np.ndarray, first: int) -> None:
    """The heaviest of a[first:], to 1e-6 of the smallest; shares descending; −1 and 0 past the end."""
    count = min(len(index), len(a) - first)
    taken = index[:count]
    assert (index[count:] == -1).all() and not weight[count:].any(), "padding"
    assert len(set(taken.tolist())) == count, "an index twice"
    assert ((taken >= first) & (taken < len(a))).all(), "an index outside the history"
    if count == 0:
        return
    left = np.delete(a, taken)[first:]
    assert left.max(initial=0) <= a[taken].min() * (1 + 1e-6), "a heavier key was left out"
    assert (np.diff(weight[:count]) <= 0).all(), "weights ascend"
    np.testing.assert_allclose(weight[:count], a[taken] / a[first:].sum(), rtol=2e-5, atol=1e-30)


def exact_ties(device: Device, case: Attention, levels: int = 3) -> Arrays:
    """Weights that are sums of powers of two, most of them tied: every index and order is determined.

    q picks one coordinate per head, k holds small whole numbers, the scale is log 2 and lse is 0.
    """
    generator = np.random.default_rng(case.seed)
    q = np.zeros((len(case.rows()), case.heads, case.width))
    q[..., 0] = 1
    k = np.zeros((sum(case.lengths), case.groups, case.width))
    k[..., 0] = generator.integers(-levels, 1, k.shape[:2])
    lse = np.zeros((case.heads, len(q)))
    posed = pose(case, round_to(q, case.dtype), round_to(k, case.dtype), math.log(2), lse)
    got = run_attention(device, case, posed)
    for r, a in enumerate(posed.weights):
        rounded = np.round(a * case.heads * 2**levels)  # whole numbers: the scale is log 2 in float32 only
        first = int(posed.history_from[r])
        order = sorted(range(first, len(a)), key=lambda i: (-rounded[i], i))[: case.top_k]
        expected = order + [-1] * (case.top_k - len(order))
        assert got["index"][r].tolist() == expected, f"row {r}"
    return got


PACKING: dict[str, tuple[int, ...]] = {"lengths": (9, 0, 1, 150, 23), "prompts": (3, 0, 1, 12, 22)}
SMALL: dict[str, tuple[int, ...]] = {"lengths": (70, 5), "prompts": (40, 1)}

ATTENTION_CASES: dict[str, Attention] = {
    "bfloat16": Attention(**PACKING, heads=8, groups=2),
    "group_of_8": Attention(**SMALL, heads=8, groups=1, width=128),
    "group_of_8_twice": Attention(**SMALL, heads=16, groups=2),
    "group_of_3": Attention(**PACKING, heads=6, groups=2, width=80),
    "group_of_1": Attention(**PACKING, heads=2, groups=2, width=96),
    "group_of_2": Attention(**SMALL, heads=4, groups=2, width=64),
    "group_of_5": Attention(**SMALL, heads=5, groups=1, width=256),
    "float16": Attention(**PACKING, dtype="float16", heads=8, groups=2, width=128, renyi_alpha=2.5),
    "float16_pairs": Attention(**SMALL, dtype="float16", heads=2, groups=1),
    "float32": Attention(**PACKING, dtype="float32", heads=4, groups=1, width=64),
    "float32_pairs": Attention(**SMALL, dtype="float32", heads=2, groups=2, width=80),
    "own_lse": Attention(**PACKING, heads=8, groups=2, given_lse=False),
    "own_lse_pairs_window": Attention(**PACKING, heads=2, groups=2, given_lse=False, window=40),
    "own_lse_float32": Attention(**SMALL, dtype="float32", given_lse=False, width=40),
    "own_lse_float32_pairs": Attention(**SMALL, dtype="float32", heads=2, given_lse=False, width=20),
    "own_lse_float16": Attention(**SMALL, dtype="float16", given_lse=False),
    "own_lse_float16_pairs": Attention(**SMALL, dtype="float16", heads=1, given_lse=False),
    "response_skip": Attention(**PACKING, history="response", skip_first=14, top_k=3),
    "window": Attention(**PACKING, window=7, skip_first=2),
    "late_window": Attention(
        lengths=(500,), prompts=(1,), window=150, last_rows=40, given_lse=False, top_k=20
    ),
    "several_items": Attention(
        lengths=(1100, 300), prompts=(1, 1), last_rows=5, keys_per_item=256, given_lse=False
    ),
    "misaligned": Attention(**SMALL, slack=1, heads=8, groups=2, width=72),
    "shuffled_rows": Attention(**PACKING, shuffled=True),
    "sums_alone": Attention(**SMALL, top_k=0, wanted=()),
    "maximum_alone": Attention(**SMALL, top_k=0, wanted=("max_weight",)),
    "mass_of_64": Attention(**PACKING, top_k=1, wanted=("topk_mass",), mass_top_k=64),
    "little_shared_memory": Attention(**SMALL, heads=4, groups=1, capability=86),
    "no_rows": Attention(lengths=(4,), prompts=(5,)),
}

ATTENTION: dict[str, Check] = {name: partial(attention, case=case) for name, case in ATTENTION_CASES.items()}
ATTENTION |= {
    f"exact_ties_{seed}": partial(
        exact_ties,
        case=replace(
            Attention(
                lengths=(40 * seed + 130, 3), prompts=(60 + 40 * seed, 1), seed=seed, shuffled=seed % 2 == 1
            ),
            dtype=("bfloat16", "float16", "float32")[seed % 3],
            heads=4 if seed % 2 else 2,
            top_k=(64, 10, 1)[seed % 3],
            skip_first=seed % 5,
            window=None if seed % 4 else 100,
        ),
        levels=1 + seed % 6,
    )
    for seed in range(20)
}

HOPPER: dict[str, Attention] = {
    "wgmma_bfloat16": Attention(**PACKING, heads=8, groups=2, capability=90),
    "wgmma_wide": Attention(lengths=(300, 30), prompts=(230, 10), width=128, capability=90),
    "wgmma_many_passes": Attention(
        lengths=(300,), prompts=(290,), heads=16, groups=4, width=128, capability=90
    ),
    "wgmma_float16": Attention(**SMALL, dtype="float16", heads=3, width=80, capability=90),
    "wgmma_group_of_6": Attention(**SMALL, heads=6, groups=1, width=40, capability=90, given_lse=False),
    "wgmma_items": Attention(
        lengths=(700, 1100), prompts=(1, 1), last_rows=5, window=600, keys_per_item=256, capability=90
    ),
}
ATTENTION |= {name: partial(attention, case=case) for name, case in HOPPER.items()}
ATTENTION |= {
    "wgmma_ties": partial(
        exact_ties, case=Attention(lengths=(290,), prompts=(250,), heads=4, width=64, capability=90), levels=2
    )
}


# --- attention statistics on inputs at the edge


def no_leak(device: Device, capability: int) -> Arrays:
    """NaN in every other sequence, and behind the last key, leaves a sequence's rows as they were."""
    case = Attention(lengths=(30, 7, 41), prompts=(5, 2, 9), capability=capability)
    clean = random_problem(case)
    poisoned = clean.inputs.k.copy()
    poisoned[:30] = poisoned[37:] = 0x7FFF  # NaN
    got = run_attention(device, case, clean)
    spoiled = run_attention(device, case, replace(clean, inputs=replace(clean.inputs, k=poisoned)))
    middle = slice(26, 32)
    for name, array in got.items():
        assert array[middle].tobytes() == spoiled[name][middle].tobytes(), name
    assert np.isnan(spoiled["mass"][:26]).all() and (spoiled["index"][:26] == -1).all()
    assert not spoiled["weight"][:26].any()
    return got


def strange_lse(device: Device, capability: int) -> Arrays:
    """lse of +inf is no weight; of −inf or NaN a row without top-K and with c = 1/2."""
    case = Attention(lengths=(20,), prompts=(1,), heads=4, capability=capability)
    posed = random_problem(case)
    lse = posed.inputs.lse.copy()
    lse[:, 3] = np.inf
    lse[1, 5] = -np.inf
    lse[2, 7] = np.nan
    got = run_attention(device, case, replace(posed, inputs=replace(posed.inputs, lse=lse)))
    assert got["mass"][3] == 0 and np.isinf(got["mass"][5]) and np.isnan(got["mass"][7])
    for row in (3, 5, 7):
        assert (got["index"][row] == -1).all() and not got["weight"][row].any()
        assert abs(got["kappa"][row] - 0.5) < 1e-6
    untouched = [r for r in range(20) if r not in (3, 5, 7)]
    for r in untouched:
        assert_top_k(got["index"][r], got["weight"][r], posed.weights[r], 0)
    return got


def huge_scores(device: Device, capability: int, given_lse: bool) -> Arrays:
    """Scores up to 1e4, one key takes all of its row; above the diagonal exp overflows."""
    case = Attention(lengths=(40,), prompts=(1,), given_lse=given_lse, capability=capability, dtype="float16")
    q = np.full((40, 4, 64), 100.0)
    k = np.zeros((40, 1, 64))
    k[:, 0, 0] = np.arange(40) / 4 * 10  # scores grow by 250 a key, to 9750
    posed = pose(case, round_to(q, case.dtype), round_to(k, case.dtype), 1.0)
    got = run_attention(device, case, posed)
    np.testing.assert_allclose(got["mass"], 1, rtol=1e-3)
    assert got["index"][:, 0].tolist() == list(range(40))
    return got


def zero_weights_count(device: Device) -> Arrays:
    """All of I_t is taken when n_t < K, weights that underflow to 0 too, in order of position."""
    case = Attention(lengths=(12,), prompts=(12,), heads=1, dtype="float32", width=1)
    k = np.zeros((12, 1, 1))
    k[5] = 1e3
    posed = pose(case, round_to(np.ones((1, 1, 1)), "float32"), round_to(k, "float32"), 1.0)
    got = run_attention(device, case, posed)
    assert got["index"][0].tolist() == [5, 0, 1, 2, 3, 4, *range(6, 12)] + [-1] * 52
    return got


def independent_of_packing(device: Device, capability: int) -> Arrays:
    """The bits of a row do not depend on what else is wanted or packed."""
    case = Attention(
        lengths=(20, 190, 3),
        prompts=(4, 100, 1),
        heads=8,
        groups=2,
        window=60,
        given_lse=False,
        capability=capability,
    )
    packed = random_problem(case)
    got = run_attention(device, case, packed)
    alone = replace(case, lengths=(190,), prompts=(100,), last_rows=17)
    rows = slice(17 + 91 - 17, 17 + 91)
    inputs = replace(packed.inputs, q=packed.inputs.q[rows], k=packed.inputs.k[20:210])
    single = run_attention(device, alone, pose(alone, inputs.q, inputs.k, inputs.scale))
    for name, array in single.items():
        assert array.tobytes() == got[name][rows].tobytes(), name
    return got


ATTENTION |= {
    f"{name}_sm{capability}": partial(check, capability=capability, **options)
    for capability in (80, 90)
    for name, check, options in (
        ("no_leak", no_leak, {}),
        ("strange_lse", strange_lse, {}),
        ("huge_scores", huge_scores, {"given_lse": True}),
        ("huge_scores_own_lse", huge_scores, {"given_lse": False}),
        ("independent_of_packing", independent_of_packing, {}),
    )
}
ATTENTION["zero_weights_count"] = zero_weights_count

CHECKS: dict[str, dict[str, Check]] = {
    "comp_gae": COMP_GAE,
    "pool_history": POOL_HISTORY,
    "attention_statistics": ATTENTION,
}
