"""Every metric of every loss against its definition, counted token by token over plain numbers; and every default."""

import inspect
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import losses
from fppo.laws import references

from .batches import Batch, batches, clip, mean, spoil

Token = tuple[float, float, float]  # the new log-prob, the old one, and the advantage
Fractions = Callable[..., dict[str, Iterable[float]]]
SELECTIVE = ("clip_cov", "kl_cov", "m2po")
POLICY = (
    *("ppo_clip", "gspo", "sapo", "gpg", "cispo", "gmpo", "dppo_tv", "dppo_kl", "dro", "vespo"),
    *("dcpo", "ce_gppo", "aspo", "drpo", "opsm", "topr"),
    *SELECTIVE,
)


@st.composite
def cases(draw, rows=(1, 5)):
    """Batches with tokens of no advantage, ratios far beyond every bound on both sides, and unequal bounds."""
    batch = draw(batches(rows=rows, spread=draw(st.sampled_from([0.3, 1.0, 12.0]))))
    seed = draw(st.integers(0, 999))
    chance = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    new, old = (torch.where(chance < 0.5, x, y) for x, y in (batch[:2], batch[1::-1]))
    batch = batch._replace(log_probs=new, old_log_probs=old, advantages=batch.advantages.where(chance > 0.2, 0.0))
    low, high = draw(st.sampled_from([(0.2, 0.5), (0.5, 0.2), (0.05, 0.9), (0.9, 0.05)]))
    return batch, {"clip_low": low, "clip_high": high}


def rows_of(batch: Batch) -> list[list[Token]]:
    """The tokens in the mask of each row that has any."""
    columns = (batch.log_probs.tolist(), batch.old_log_probs.tolist(), batch.advantages.tolist(), batch.mask.tolist())
    rows = [[(x, y, a) for x, y, a, m in zip(*row, strict=True) if m] for row in zip(*columns, strict=True)]
    return [row for row in rows if row]


def expected_of(name: str, batch: Batch, options: dict, selected: torch.Tensor) -> dict[str, list[float]]:
    """The number of each token in the mask, whose mean is the metric."""
    low, high = (options.get(x, math.nan) for x in ("clip_low", "clip_high"))
    chosen = [x for row, m in zip(selected.tolist(), batch.mask.tolist(), strict=True) for x, y in zip(row, m) if y]
    rows, tokens = rows_of(batch), [token for row in rows_of(batch) for token in row]
    bounded = name not in ("gspo", "gmpo", "dro", "vespo", "clip_cov", "kl_cov")
    apart = [x - y for x, y, _ in tokens]
    report = {"ppo_kl": [-clip(d, -20, 20) if bounded else -d for d in apart]}
    if name in ("ppo_clip", "gspo"):
        logs = apart if name == "ppo_clip" else [mean(x - y for x, y, _ in row) for row in rows for _ in row]
        ratios = [math.exp(clip(d, -20, 20) if name == "ppo_clip" else min(d, 10.0)) for d in logs]
        both = [(-a * r, -a * clip(r, 1 - low, 1 + high), a) for r, (_, _, a) in zip(ratios, tokens, strict=True)]
        report["pg_clipfrac"] = [cut > plain for plain, cut, _ in both]
        if (dual := options.get("dual_clip")) is not None:
            report["pg_clipfrac_lower"] = [a < 0 and max(plain, cut) > -a * dual for plain, cut, a in both]
    elif name == "cispo":
        ratios = [math.exp(clip(d, -20, 20)) for d in apart]
        report["pg_clipfrac"] = [r < 1 - low or r > 1 + high for r in ratios]
    elif name == "gmpo":
        outside = [d < -low or d > high for d in apart]
        report["pg_clipfrac"] = [out and a > 0 for out, (_, _, a) in zip(outside, tokens, strict=True)]
        report["pg_clipfrac_lower"] = [out and a < 0 for out, (_, _, a) in zip(outside, tokens, strict=True)]
    elif name.startswith("dppo"):
        kept = [trusted(name, token, low, high) for token in tokens]
        ratios = [math.exp(clip(d, -20, 20)) for d in apart]
        report["pg_clipfrac"] = [not k for k in kept]
        report["pg_clipfrac_lower"] = [k and r > options["max_ratio"] for k, r in zip(kept, ratios, strict=True)]
    elif name == "vespo":
        weights = [vespo_weight(row, a, options) for row in rows for _, _, a in row]
        report["pg_clipfrac"] = [w < 0.5 for w in weights]
    elif name in LATER:
        report |= LATER[name](rows, options)
    elif name in ("clip_cov", "m2po"):
        report["pg_clipfrac"] = chosen
    elif name == "kl_cov":
        report["ppo_kl"] = [abs(d) for d in apart]
    return report


def of_dcpo(rows: list[list[Token]], options: dict) -> dict[str, list[float]]:
    report: dict[str, list[float]] = {"pg_clipfrac": [], "pg_clipfrac_lower": []}
    for x, y, a in (token for row in rows for token in row):
        r, q = math.exp(clip(x - y, -20, 20)), math.exp(y)
        low = (1 + math.sqrt(max(0.0, 1 - 4 * options["clip_low"] / q))) / 2
        high = min((1 + math.sqrt(1 + 4 * options["clip_high"] / q)) / 2, options["max_ratio"])
        report["pg_clipfrac"].append((a > 0 and r > high) or (a < 0 and r < low))
        report["pg_clipfrac_lower"].append(a < 0 and r > options["max_ratio"])
    return report


def of_opsm(rows: list[list[Token]], options: dict) -> dict[str, list[float]]:
    report = of_ratio(rows, options)
    far = [mean(y - x for x, y, _ in row) > options["max_kl"] for row in rows]
    report["pg_clipfrac_lower"] = [gone and a < 0 for row, gone in zip(rows, far, strict=True) for _, _, a in row]
    return report


def of_ratio(rows: list[list[Token]], options: dict) -> dict[str, list[float]]:
    """Of the losses whose ratio is bounded as PPO's."""
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    ratios = [(math.exp(clip(x - y, -20, 20)), a) for row in rows for x, y, a in row]
    return {"pg_clipfrac": [(a > 0 and r > high) or (a < 0 and r < low) for r, a in ratios]}


def of_drpo(rows: list[list[Token]], options: dict) -> dict[str, list[float]]:
    moved = [(math.exp(x) - math.exp(y), a) for row in rows for x, y, a in row]
    return {"pg_clipfrac": [m > options["clip_high"] if a > 0 else m < -options["clip_low"] for m, a in moved]}


def of_topr(rows: list[list[Token]], options: dict) -> dict[str, list[float]]:
    report: list[float] = []
    for row in rows:
        for x, y, a in row:
            log = sum(u - v for u, v, _ in row) if options["level"] == "sequence" else x - y
            report.append(a <= 0 and not options["low"] <= math.exp(clip(log, -20, 20)) <= options["high"])
    return {"pg_clipfrac": report}


LATER = {"dcpo": of_dcpo, "ce_gppo": of_ratio, "aspo": of_ratio, "drpo": of_drpo, "opsm": of_opsm, "topr": of_topr}


def trusted(name: str, token: Token, low: float, high: float) -> bool:
    x, y, a = token
    p, q = math.exp(x), math.exp(y)
    if name == "dppo_tv":
        return p - q <= high if a > 0 else p - q >= -low
    kl = q * (y - x) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (kl <= high or p <= q) if a > 0 else (kl <= low or p >= q)


def vespo_weight(row: list[Token], a: float, options: dict) -> float:
    total = clip(sum(x - y for x, y, _ in row), -20, 20)
    k, lam = (options["k_pos"], options["lam_pos"]) if a > 0 else (options["k_neg"], options["lam_neg"])
    return math.exp(clip(k * total + lam * (1 - math.exp(total)), -700, 700))


OWN: dict[str, dict[str, list]] = {
    "ppo_clip": {"dual_clip": [None, 1.2, 3.0]},
    "sapo": {"tau_pos": [0.7], "tau_neg": [1.4]},
    "dppo_tv": {"max_ratio": [1.3, 4.0]},
    "dppo_kl": {"max_ratio": [1.3, 4.0]},
    "dro": {"beta": [0.6]},
    "vespo": {"k_pos": [1.5], "lam_pos": [2.5], "k_neg": [2.0], "lam_neg": [0.5]},
    "dcpo": {"max_ratio": [1.5, 10.0]},
    "ce_gppo": {"beta_low": [0.75], "beta_high": [0.5]},
    "aspo": {"max_ratio": [1.3, 3.0]},
    "opsm": {"max_kl": [0.05, 0.4]},
    "topr": {"level": ["sequence", "token"], "low": [0.0, 0.5], "high": [1.0, 1.4]},
    "kl_cov": {"kl_coef": [0.7]},
}


@pytest.mark.parametrize("name", POLICY)
@given(data=st.data())
def test_every_metric_is_the_mean_of_its_tokens(name, data):
    batch, bounds = data.draw(cases())
    own = {option: data.draw(st.sampled_from(values)) for option, values in OWN.get(name, {}).items()}
    options = own | (bounds if "clip_low" in inspect.signature(getattr(losses, name)).parameters else {})
    selected = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    extra = {"selected": selected} if name in SELECTIVE else {}
    dirty = [spoil(x, batch.mask) for x in batch[:3]]
    _, report = getattr(losses, name)(*dirty, batch.mask, **options, **extra)
    expected = expected_of(name, batch, options, selected)
    assert {f"actor/{metric}" for metric in expected} == report.keys()
    for metric, numbers in expected.items():
        found = report[f"actor/{metric}"]
        assert found.count.item() == len(numbers), metric
        assert found.total.item() == pytest.approx(math.fsum(numbers), rel=1e-9, abs=1e-9), metric


@pytest.mark.parametrize("name", [name for name in POLICY if name not in SELECTIVE])
@given(case=cases(), seed=st.integers(0, 99))
def test_loss_and_gradient_are_the_loops_with_any_bounds(name, case, seed):
    """Also far off the policy, where bounds of ratios hold, and with a token's own bounds of the clip."""
    batch, bounds = case
    options = {option: values[seed % len(values)] for option, values in OWN.get(name, {}).items()}
    options |= bounds if "clip_low" in inspect.signature(getattr(losses, name)).parameters else {}
    found, expected = (loss_and_slope(getattr(of, name), batch, options) for of in (losses, references.losses))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if name in ("ppo_clip", "gspo", "cispo"):
        spread = {bound: torch.full_like(batch.advantages, options[bound]) for bound in bounds}
        for one, other in zip(loss_and_slope(getattr(losses, name), batch, options | spread), found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def loss_and_slope(loss_fn, batch: Batch, options: dict) -> list[torch.Tensor]:
    leaf = batch.log_probs.clone().requires_grad_()
    loss = loss_fn(leaf, *batch[1:], **options)[0]
    total = loss.sum()
    return [loss.detach(), torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(leaf)]


def value_metrics(batch: Batch, cost: Callable[[float], float], margin: float | None) -> dict[str, list[float]]:
    tokens = [token for row in rows_of(batch) for token in row]
    report: dict[str, list[float]] = {"vpred_mean": [v for v, _, _ in tokens]}
    if margin is not None:
        cut = [cost(clip(v, old - margin, old + margin) - r) > cost(v - r) for v, old, r in tokens]
        report["vf_clipfrac"] = [float(x) for x in cut]
    return report


def huber(error: float, delta: float) -> float:
    return error * error / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)


@pytest.mark.parametrize("margin", [None, 0.1, 0.5])
@given(batch=batches())
def test_metrics_of_the_losses_of_values_are_means_of_their_tokens(margin, batch):
    dirty = [spoil(x, batch.mask) for x in batch[:3]]
    found = (
        (losses.value_loss(*dirty, batch.mask, clip=margin)[1], lambda e: e * e),
        (losses.huber_value_loss(*dirty, batch.mask, delta=0.4, clip=margin)[1], lambda e: huber(e, 0.4)),
    )
    for report, cost in found:
        expected = value_metrics(batch, cost, margin)
        assert {f"critic/{metric}" for metric in expected} == report.keys()
        for metric, numbers in expected.items():
            assert report[f"critic/{metric}"].count.item() == len(numbers)
            assert report[f"critic/{metric}"].total.item() == pytest.approx(math.fsum(numbers), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("head", ["hl_gauss", "two_hot", "quantile"])
@given(batch=batches(), seed=st.integers(0, 99))
def test_metrics_of_heads_of_several_outputs_are_means_of_their_tokens(head, batch, seed):
    """The value is the mean under the outputs, and returns beyond the range are counted, those at its ends are not."""
    low, high, bins = -0.6, 0.9, 4
    span = {} if head == "quantile" else {"low": low, "high": high}
    made = getattr(losses, f"{head}_head")(bins=bins, **span)
    outputs = torch.randn(*batch.mask.shape, bins, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    returns = torch.where(batch.advantages.abs() < 0.2, high, batch.advantages)
    half = (high - low) / bins / 2 if head == "hl_gauss" else 0.0
    places = [low + half + i * (high - low - 2 * half) / (bins - 1) for i in range(bins)]
    values, beyond = [], []
    for row, column in batch.mask.nonzero().tolist():
        numbers = outputs[row, column].tolist()
        weights = (
            [1 / bins] * bins if head == "quantile" else [math.exp(x) / sum(map(math.exp, numbers)) for x in numbers]
        )
        values.append(sum(w * x for w, x in zip(weights, numbers if head == "quantile" else places, strict=True)))
        beyond.append(not low <= returns[row, column].item() <= high)
    dirty = outputs.where(batch.mask[..., None], math.nan)
    _, report = made.loss_fn(dirty, spoil(returns, batch.mask), spoil(returns, batch.mask), batch.mask)
    expected = {"critic/vpred_mean": values} | ({} if head == "quantile" else {"critic/vf_outside": beyond})
    assert expected.keys() == report.keys()
    for metric, numbers in expected.items():
        assert report[metric].count.item() == len(numbers)
        assert report[metric].total.item() == pytest.approx(math.fsum(numbers), rel=1e-9, abs=1e-9)


HEADS = {
    "huber_value_loss": ({"delta": 0.4, "clip": 0.3}, 1),
    "hl_gauss": ({"low": -0.6, "high": 0.9, "sigma": 0.6}, 4),
    "two_hot": ({"low": -0.6, "high": 0.9}, 4),
    "quantile_loss": ({"delta": 0.4}, 3),
}


@pytest.mark.parametrize("name", HEADS)
@given(batch=batches(), seed=st.integers(0, 99))
def test_losses_of_values_and_their_gradients_are_the_loops(name, batch, seed):
    """Huber's, and those of heads of several outputs, of returns within and beyond the range."""
    options, width = HEADS[name]
    g = torch.Generator().manual_seed(seed)
    outputs = torch.randn(*batch.mask.shape, width, generator=g, dtype=torch.float64)
    outputs = outputs if width > 1 else outputs[..., 0]
    results = []
    for of in (losses, references.values):
        leaf = outputs.clone().requires_grad_()
        loss = getattr(of, name)(leaf, batch.old_log_probs, batch.advantages, batch.mask, **options)[0]
        total = (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum()
        slope = torch.autograd.grad(total, leaf)[0] if total.requires_grad else torch.zeros_like(leaf)
        results.append((loss.detach(), slope))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


OF_VALUES = ("value_loss", "huber_value_loss", "hl_gauss", "two_hot", "quantile_loss")


@pytest.mark.parametrize("name", [*POLICY, *OF_VALUES, "select_clip_cov", "select_kl_cov", "rollout_correction"])
def test_a_default_is_the_one_that_the_slow_definition_has(name):
    of = references.values if name in OF_VALUES else references.losses
    kept, expected = (inspect.signature(getattr(module, name)).parameters for module in (losses, of))
    for option in kept.keys() & expected.keys():
        assert kept[option].default == expected[option].default, option


def test_defaults_are_the_papers():
    """Defaults of the losses by name, as their settings say them."""
    defaults = {
        name: {
            k: p.default
            for k, p in inspect.signature(getattr(losses, name)).parameters.items()
            if p.default is not p.empty
        }
        for name in (*POLICY, *OF_VALUES)
    }
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    assert defaults == {
        "ppo_clip": {**clips, "dual_clip": 3.0},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
        "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
        "gpg": {},
        "cispo": clips,
        "gmpo": clips,
        "dppo_tv": {**clips, "max_ratio": 20.0},
        "dppo_kl": {**clips, "max_ratio": 20.0},
        "dro": {"beta": 0.1},
        "vespo": {"k_pos": 2.0, "lam_pos": 3.0, "k_neg": 3.0, "lam_neg": 2.0},
        "dcpo": {"clip_low": 0.1, "clip_high": 0.2, "max_ratio": 10.0},
        "ce_gppo": {**clips, "beta_low": 0.75, "beta_high": 1.0},
        "aspo": {**clips, "max_ratio": 3.0},
        "drpo": {"clip_low": 12.5, "clip_high": 12.5},
        "opsm": {**clips, "max_kl": 0.1},
        "topr": {"level": "sequence", "low": 0.0, "high": 1.0},
        "clip_cov": clips,
        "kl_cov": {"kl_coef": 0.1},
        "m2po": {},
        "value_loss": {"clip": 0.5},
        "huber_value_loss": {"delta": 1.0, "clip": 0.5},
        "hl_gauss": {"sigma": 0.75},
        "two_hot": {},
        "quantile_loss": {"delta": 1.0},
    }


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_move_of_exactly_the_bound_is_trusted(sign):
    """From a probability of 1/2 to 1, or back, with a bound of 1/2: numbers that floating point has."""
    half, one = torch.tensor([[0.5]]).double().log(), torch.zeros(1, 1).double()
    new, old = (one, half) if sign > 0 else (half, one)
    there, bounds = torch.ones(1, 1, dtype=torch.bool), {"clip_low": 0.5, "clip_high": 0.5}
    _, report = losses.dppo_tv(new, old, torch.full((1, 1), sign).double(), there, **bounds)
    assert report["actor/pg_clipfrac"].total == 0
    _, report = losses.dppo_tv(new, old, torch.full((1, 1), sign).double(), there, clip_low=0.49, clip_high=0.49)
    assert report["actor/pg_clipfrac"].total == 1


IMPOSSIBLE = [(name, option) for name in POLICY for option in inspect.signature(getattr(losses, name)).parameters]
IMPOSSIBLE = [
    (name, option) for name, option in IMPOSSIBLE if option.startswith(("clip_", "tau_", "max_", "k_", "lam_"))
]


@pytest.mark.parametrize(("name", "option"), IMPOSSIBLE)
def test_a_bound_of_zero_is_refused_by_its_name(name, option):
    x, there = -torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    extra = {"selected": there} if name in SELECTIVE else {}
    with pytest.raises(ValueError, match=f"{option} must be > 0, got 0"):
        getattr(losses, name)(x, x, x, there, **extra, **{option: 0.0})
