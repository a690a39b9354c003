"""Policy losses, KL estimates, weights of tokens and off-policy corrections, as loops over the papers' formulas.

Signatures, defaults and sources are those of `fppo.losses`; a loss returns (loss per token [B, T], no metrics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fppo.losses import Correction
from fppo.metrics import Metrics

Row = list[Tensor]  # the numbers of a row's tokens in its mask, each 0-d
Result = tuple[Tensor, Metrics]


def by_row(of_row: Callable[..., Sequence[Tensor]], mask: Tensor, *columns: Tensor) -> Tensor:
    """Results [B, T] of a function of each row's tokens in the mask, 0 elsewhere. The function gets a list [n] for each
    column [B, T], and returns a list [n]."""
    zero = columns[0].new_zeros(())
    rows = [[zero] * mask.shape[1] for _ in mask]
    for b, kept in enumerate(mask.tolist()):
        places = [t for t, inside in enumerate(kept) if inside]
        if places:
            for t, x in zip(places, of_row(*([column[b, t] for t in places] for column in columns)), strict=True):
                rows[b][t] = x
    return torch.stack([torch.stack(row) if row else columns[0].new_zeros(0) for row in rows]) if rows else columns[0]


def _by_token(of_token: Callable[[Tensor, Tensor, Tensor], Tensor], *batch: Tensor) -> Result:
    log_probs, old, advantages, mask = batch

    def of_row(x: Row, y: Row, a: Row) -> Row:
        return [of_token(*token) for token in zip(x, y, a, strict=True)]

    return by_row(of_row, mask, log_probs, old.detach(), advantages.detach()), {}


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).clamp(-20.0, 20.0).exp()


def _clip(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    return a if a >= b else b


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Result:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0; r = pi / pi_old, A the
    advantage."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        r = _ratio(x, y)
        loss = _larger(-a * r, -a * _clip(r, 1 - clip_low, 1 + clip_high))
        return -a * dual_clip if dual_clip is not None and a < 0 and loss > -a * dual_clip else loss

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Result:
    """PPO's clipped loss on the ratio s of a whole row, exp(mean of the row's log-ratios). For the gradient s is held
    constant and multiplied by r_t = pi / pi', where pi' is pi as a constant, so that r_t = 1."""

    def of_row(x: Row, y: Row, a: Row) -> Row:
        mean = sum(u.detach() - v for u, v in zip(x, y, strict=True)) / len(x)
        losses: Row = []
        for u, b in zip(x, a, strict=True):
            s = (u - u.detach() + mean).clamp(max=10.0).exp()
            losses.append(_larger(-b * s, -b * _clip(s, 1 - clip_low, 1 + clip_high)))
        return losses

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach()), {}


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Result:
    """-A (4 / tau) / (1 + exp(-tau (r - 1))), with r = pi / pi_old; tau is tau_pos where A > 0, else tau_neg."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        tau = tau_pos if a > 0 else tau_neg
        return -a * 4 / tau / (1 + (-tau * (_ratio(x, y) - 1)).exp())

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Result:
    """-A log pi, with A the advantage and pi the probability of the token."""
    return _by_token(lambda x, y, a: -a * x, log_probs, old_log_probs, advantages, mask)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Result:
    """-A clip(r, 1 - clip_low, 1 + clip_high) log pi, with r = pi / pi_old; the clipped ratio is a constant."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        return -a * _clip(_ratio(x, y), 1 - clip_low, 1 + clip_high).detach() * x

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Result:
    """-mean(A) exp(mean(u)) over the row, at each of its tokens. With d = log(pi / pi_old), u is min(d, clip_high)
    where A > 0, max(d, -clip_low) where A < 0, and 0 where A is 0."""

    def of_row(x: Row, y: Row, a: Row) -> Row:
        total = x[0] * 0.0
        for u, v, b in zip(x, y, a, strict=True):
            d = u - v
            total = total + (d.clamp(max=clip_high) if b > 0 else d.clamp(min=-clip_low) if b < 0 else 0.0)
        return [-sum(a) / len(a) * (total / len(x)).exp()] * len(x)

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach()), {}


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
) -> Result:
    """-A min(r, max_ratio) log pi, the ratio r = pi / pi_old a constant, at tokens where pi - pi_old is at most
    clip_high (if A > 0), or at least -clip_low (else); 0 at all other tokens."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        moved = x.exp() - y.exp()
        kept = moved <= clip_high if a > 0 else moved >= -clip_low
        return -a * _ratio(x, y).clamp(max=max_ratio).detach() * x * float(kept)

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
) -> Result:
    """-A min(r, max_ratio) log pi, the ratio r = pi / pi_old a constant, at some tokens; 0 at all others. With KL the
    divergence from old to new policy of the two events "this token" and "another token", the loss keeps a token if KL
    is at most clip_high (where A > 0) or clip_low (else), or if pi moved against the advantage."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        p, q = x.exp(), y.exp()
        kl = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        kept = (kl <= clip_high or p <= q) if a > 0 else (kl <= clip_low or p >= q)
        return -a * _ratio(x, y).clamp(max=max_ratio).detach() * x * float(kept)

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float = 0.1) -> Result:
    """-(A log pi - beta / 2 (log (pi / pi_old))^2), with A the advantage."""
    return _by_token(lambda x, y, a: -(x * a - beta / 2 * (x - y) ** 2), log_probs, old_log_probs, advantages, mask)


def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> Result:
    """-A W^k exp(lam (1 - W)) log pi, with W the product of the row's ratios pi / pi_old (its logarithm clamped to
    +-20), and W^k exp(lam (1 - W)) a constant. k and lam are k_pos and lam_pos where A > 0, else k_neg and lam_neg."""

    def of_row(x: Row, y: Row, a: Row) -> Row:
        total = torch.stack([u.detach() - v for u, v in zip(x, y, strict=True)]).sum().clamp(-20.0, 20.0)
        losses: Row = []
        for u, b in zip(x, a, strict=True):
            k, lam = (k_pos, lam_pos) if b > 0 else (k_neg, lam_neg)
            losses.append(-b * (k * total).exp() * (lam * (1 - total.exp())).exp() * u)
        return losses

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach()), {}


def dcpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.1,
    clip_high: float = 0.2,
    max_ratio: float = 10.0,
) -> Result:
    """max(-A r, -A clip(r, low, high)), at most -A max_ratio where A < 0. With q = pi_old, low and high are the numbers
    r nearest to 1 with (1 - r) r q = clip_low and (r - 1) r q = clip_high; low is 1/2 where q is too small for one,
    and high at most max_ratio."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        q, r = math.exp(y.item()), _ratio(x, y)
        inner = 1 - 4 * clip_low / q
        low, high = (1 + math.sqrt(max(inner, 0.0))) / 2, min((1 + math.sqrt(1 + 4 * clip_high / q)) / 2, max_ratio)
        loss = _larger(-a * r, -a * _clip(r, low, high))
        return -a * max_ratio if a < 0 and loss > -a * max_ratio else loss

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def ce_gppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta_low: float = 0.75,
    beta_high: float = 1.0,
) -> Result:
    """-A r; where A < 0 and r < 1 - clip_low, -A beta_low (1 - clip_low) r / r', and where A > 0 and r > 1 + clip_high,
    -A beta_high (1 + clip_high) r / r', with r' = r as a constant."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        r = _ratio(x, y)
        one = r / r.detach()
        if a < 0 and r < 1 - clip_low:
            return -a * beta_low * (1 - clip_low) * one
        return -a * beta_high * (1 + clip_high) * one if a > 0 and r > 1 + clip_high else -a * r

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def aspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 3.0,
) -> Result:
    """PPO's clipped loss where A <= 0. Where A > 0, -A min(1 / r', max_ratio) pi / pi', with primes for constants; 0 if
    r > 1 + clip_high."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        r = _ratio(x, y)
        if a <= 0:
            return _larger(-a * r, -a * _clip(r, 1 - clip_low, 1 + clip_high))
        return x * 0.0 if r > 1 + clip_high else -a * min(1 / r.item(), max_ratio) * x.exp() / math.exp(x.item())

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def drpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 12.5,
    clip_high: float = 12.5,
) -> Result:
    """-A r + |A| pi_old (r - 1)^2 / (2 bound), with the bound clip_high where A > 0, else clip_low."""

    def of_token(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        r, bound = _ratio(x, y), clip_high if a > 0 else clip_low
        return -a * r + abs(a.item()) * math.exp(y.item()) * (r - 1) ** 2 / (2 * bound)

    return _by_token(of_token, log_probs, old_log_probs, advantages, mask)


def opsm(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_kl: float = 0.1,
) -> Result:
    """PPO's clipped loss without a dual clip, times M: 0 where A < 0 and the row's mean of log(pi_old / pi) exceeds
    max_kl, else 1."""

    def of_row(x: Row, y: Row, a: Row) -> Row:
        kl = sum((v - u).item() for u, v in zip(x, y, strict=True)) / len(x)
        losses: Row = []
        for u, v, b in zip(x, y, a, strict=True):
            r = _ratio(u, v)
            loss = _larger(-b * r, -b * _clip(r, 1 - clip_low, 1 + clip_high))
            losses.append(u * 0.0 if b < 0 and kl > max_kl else loss)
        return losses

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach()), {}


def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str = "sequence",
    low: float = 0.0,
    high: float = 1.0,
) -> Result:
    """-A log pi where A > 0, else -A clip(w, low, high) log pi, with w a constant: the product of the row's ratios
    pi / pi_old, or the token's own (`level` "token"); its logarithm is clamped to +-20."""

    def of_row(x: Row, y: Row, a: Row) -> Row:
        logs = [(u - v).item() for u, v in zip(x, y, strict=True)]
        losses: Row = []
        for u, b, own in zip(x, a, logs, strict=True):
            w = math.exp(max(-20.0, min(sum(logs) if level == "sequence" else own, 20.0)))
            losses.append(-b * u if b > 0 else -b * max(low, min(w, high)) * u)
        return losses

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach()), {}


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Result:
    """PPO's clipped loss without a dual clip, 0 at the selected tokens."""

    def of_row(x: Row, y: Row, a: Row, chosen: Row) -> Row:
        losses: Row = []
        for u, v, b, gone in zip(x, y, a, chosen, strict=True):
            r = (u - v).exp()
            losses.append(u * 0.0 if gone else _larger(-b * r, -b * _clip(r, 1 - clip_low, 1 + clip_high)))
        return losses

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach(), selected), {}


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    selected: Tensor,
    kl_coef: float = 0.1,
) -> Result:
    """-A r, with r = pi / pi_old, plus kl_coef |log r| at the selected tokens."""

    def of_row(x: Row, y: Row, a: Row, chosen: Row) -> Row:
        each = zip(x, y, a, chosen, strict=True)
        return [-b * (u - v).exp() + kl_coef * (u - v).abs() * float(held) for u, v, b, held in each]

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach(), selected), {}


Place = tuple[int, int, float, float, float]  # row, column, log-prob, old log-prob, advantage


def _places(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> list[Place]:
    lp, y, a = (x.tolist() for x in (log_probs, old, advantages))
    return [(i, t, lp[i][t], y[i][t], a[i][t]) for i, t in mask.nonzero().tolist()]


def _covariances(places: Sequence[Place]) -> list[float]:
    a, x = (sum(place[i] for place in places) / len(places) for i in (4, 2))
    return [(place[4] - a) * (place[2] - x) for place in places]


def _chosen(places: Sequence[tuple[int, int]], mask: Tensor) -> Tensor:
    every = set(places)
    return torch.tensor([[(i, t) in every for t in range(mask.shape[1])] for i in range(len(mask))]).view(mask.shape)


def select_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    noise: Tensor,
    ratio: float = 0.0002,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """The max(1, ratio * tokens) tokens with the smallest noise among those with a covariance in (low, high) and an
    unclipped loss; bool [B, T]."""
    places, found = _places(log_probs, old_log_probs, advantages, mask), list[tuple[float, int, int]]()
    for (i, t, x, y, a), cov in zip(places, _covariances(places) if places else (), strict=True):
        r = math.exp(x - y)
        clipped = -a * max(1 - clip_low, min(r, 1 + clip_high)) > -a * r
        if low < cov < high and not clipped:
            found.append((noise[i, t].item(), i, t))
    return _chosen([(i, t) for _, i, t in sorted(found)[: max(int(ratio * len(places)), 1)]], mask)


def select_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    noise: Tensor,
    ratio: float = 0.0002,
) -> Tensor:
    """The max(1, ratio * tokens) tokens with the largest covariance, ties broken by the smallest noise; bool [B, T]."""
    places = _places(log_probs, old_log_probs, advantages, mask)
    covariances = _covariances(places) if places else []
    ranked = sorted((-cov, noise[i, t].item(), i, t) for (i, t, *_), cov in zip(places, covariances, strict=True))
    return _chosen([(i, t) for _, _, i, t in ranked[: max(1, int(len(places) * ratio))]], mask)


def m2po(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, selected: Tensor) -> Result:
    """-A r, with r = pi / pi_old, and 0 at the selected tokens."""

    def of_row(x: Row, y: Row, a: Row, chosen: Row) -> Row:
        each = zip(x, y, a, chosen, strict=True)
        return [u * 0.0 if gone else -b * _ratio(u, v) for u, v, b, gone in each]

    return by_row(of_row, mask, log_probs, old_log_probs.detach(), advantages.detach(), selected), {}


def select_m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    noise: Tensor,
    threshold: float = 0.04,
) -> Tensor:
    """One token after the other, by (log r)^2 from the largest, and of equal ones by the smallest noise, until the mean
    of the others is at most the threshold, or one is left; bool [B, T]."""
    places = _places(log_probs, old_log_probs, advantages, mask)
    ranked = sorted((-((x - y) ** 2), noise[i, t].item(), i, t) for i, t, x, y, _ in places)
    count = 0
    while len(ranked) - count > 1 and -sum(m for m, *_ in ranked[count:]) / (len(ranked) - count) > threshold:
        count += 1
    return _chosen([(i, t) for _, _, i, t in ranked[:count]], mask)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str, *, mask: Tensor | None = None) -> Tensor:
    """The KL estimate of each token, of one of the kinds of `losses.kl_estimate`. A kind with "+" has the value of the
    kind before it, and the gradient of half the squared log-ratio."""

    def of_row(x: Row, y: Row) -> Row:
        estimates: Row = []
        for u, v in zip(x, y, strict=True):
            d, e = u - v, (v - u).clamp(-20.0, 20.0)
            k3 = (e.exp() - 1 - e).clamp(-10.0, 10.0)
            value = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": k3}[kind.removesuffix("+")]
            half = d * d / 2
            estimates.append(value.detach() + half - half.detach() if kind.endswith("+") else value)
        return estimates

    every = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    return by_row(of_row, every, log_probs, ref_log_probs.detach())


def mini_batch_loss(per_token: Tensor, mask: Tensor, mode: str, *, horizon: float | None = None) -> Tensor:
    """The loss of a whole mini-batch, 0-d, which sum(loss_weights * per_token) must equal."""
    rows = [per_token[b][mask[b]] for b in range(len(mask)) if mask[b].any()]
    if not rows:
        return per_token.new_zeros(())
    sums, lengths = torch.stack([row.sum() for row in rows]), torch.tensor([len(row) for row in rows])
    if mode == "token-mean":
        return sums.sum() / lengths.sum()
    if mode == "token-sum":
        return sums.sum()
    if mode == "seq-mean-token-sum":
        return sums.sum() / len(rows)
    if mode == "seq-mean-token-mean":
        return (sums / lengths).sum() / len(rows)
    if horizon is None:
        raise ValueError(f"mode {mode!r} needs a horizon")
    return sums.sum() / len(rows) / horizon


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str | None = "token",
    threshold: float | tuple[float, float] = 2.0,
    batch_normalize: bool = False,
    reject: str | None = None,
    reject_bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Correction:
    """The weights, training over rollout probability, cut down to a single threshold, or 0 outside a pair of
    thresholds; and the mask without the tokens whose `rejection_statistic` is below or above `reject_bounds`."""
    ratios = [x[kept].tolist() for x, kept in zip((old_log_probs - rollout_log_probs).detach(), mask, strict=True)]
    low, high = threshold if isinstance(threshold, tuple) else (None, threshold)
    weights: list[list[float]] = []
    for row in ratios:
        logs = row if level == "token" else [sum(row)] * len(row)
        raw = [math.exp(max(-20.0, min(x, 20.0))) for x in logs]
        weights.append([min(w, high) if low is None else w if low <= w <= high else 0.0 for w in raw])
    if batch_normalize and any(weights):
        over = [w for row in weights for w in (row if level == "token" else row[:1])]
        mean = sum(over) / len(over)
        weights = [[w / mean if mean > 1e-8 else w for w in row] for row in weights]
    keeps = [[True] * len(row) for row in ratios]
    if reject is not None:
        statistics = [rejection_statistic(row, reject)[0] if row else [] for row in ratios]
        keeps = [[reject_bounds[0] <= s <= reject_bounds[1] for s in row] for row in statistics]
    kept = mask.clone().masked_scatter(mask, torch.tensor([k for row in keeps for k in row], dtype=torch.bool))
    if level is None:
        return Correction(None, kept, {})
    numbers = torch.tensor([w for row in weights for w in row], dtype=old_log_probs.dtype)
    spread = torch.zeros_like(old_log_probs).masked_scatter(mask, numbers)
    return Correction(spread.where(kept, 0.0), kept, {})


def rejection_statistic(log_ratios: Sequence[float], option: str) -> tuple[list[float], float]:
    """A rejection option's statistic at each token of a row, and of the row, from log(training / rollout)."""
    kind, x = option[-2:], [max(-20.0, min(v, 20.0)) for v in log_ratios]
    tokens = [{"k1": -v, "k2": v * v / 2, "k3": math.exp(v) - 1 - v}[kind] for v in x]
    value = max(tokens) if option.startswith("seq_max") else sum(tokens)
    value = value if option.startswith(("seq_max", "seq_sum")) else value / len(tokens)
    return (tokens if option.startswith("token") else [value] * len(tokens)), value
