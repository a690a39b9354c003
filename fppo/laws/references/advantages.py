"""Estimators of advantages, as loops over groups, rows and tokens.

Signatures, defaults and sources are those of `fppo.advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from fppo.advantages import Advantages

Numbers = list[float]


def _grouped(of_row: Callable[[Tensor, Tensor, int], Tensor | float], scores: Tensor, mask: Tensor, groups: Tensor):
    """Advantages of scores [B] by group. `of_row` makes a row's number from its group's scores [n], the group's lengths
    [n], and the row's index in the group; the number is spread over the row's tokens. Rows without tokens are in no
    group. Returns are the scores."""
    members: dict[int, list[int]] = {}
    for b, group in enumerate(groups.tolist()):
        if mask[b].any():
            members.setdefault(group, []).append(b)
    each = torch.zeros_like(scores)
    for rows in members.values():
        own, lengths = scores[rows].detach(), mask[rows].sum(1).to(scores)
        for i, b in enumerate(rows):
            each = each.index_put((torch.tensor(b),), torch.as_tensor(of_row(own, lengths, i), dtype=scores.dtype))
    return Advantages(each[:, None].where(mask, 0.0), scores.detach()[:, None].where(mask, 0.0))


def _deviation(s: Tensor, i: int) -> Tensor:
    """A score minus its group's mean, computed relative to the first score, so that equal scores give exactly 0."""
    return (s[i] - s[0]) - (s - s[0]).mean()


def _divisor(s: Tensor, scale: str) -> Tensor | float:
    return 1.0 if scale == "none" or len(s) == 1 else s.std() + 1e-6


def grpo(scores: Tensor, mask: Tensor, groups: Tensor, *, scale: str = "std") -> Advantages:
    """(S - mean) / (std + 1e-6), with S the row's score, and mean and std over its group; 0 for the only row of a
    group. `scale` "none" leaves the division out."""
    return _grouped(lambda s, n, i: _deviation(s, i) / _divisor(s, scale), scores, mask, groups)


def grpo_process(step_rewards: Tensor, mask: Tensor, groups: Tensor, *, scale: str = "std") -> Advantages:
    """The sum of (R - mean) / (std + 1e-6) over the steps that end at a token or after it, with R the reward of a step,
    and mean and std over the steps of the group; 0 in a group of one step. `scale` "none" leaves the division out."""
    ends = [
        (b, t)
        for b, row in enumerate(mask.tolist())
        for t, kept in enumerate(row)
        if kept and step_rewards[b, t] == step_rewards[b, t]
    ]
    advantages, returns = torch.zeros_like(step_rewards), torch.zeros_like(step_rewards)
    for i, (b, t) in enumerate(ends):
        own = [j for j, (row, _) in enumerate(ends) if groups[row] == groups[b]]
        r = torch.stack([step_rewards[ends[j]] for j in own]).detach()
        normal = _deviation(r, own.index(i)) / _divisor(r, scale)
        for s in range(t + 1):
            if mask[b, s]:
                advantages[b, s] += normal
                returns[b, s] += step_rewards[b, t].detach()
    return Advantages(advantages, returns)


def maxrl(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """(S - mean) / mean, with S the row's score and the mean over its group; 0 where the mean is at most 1e-6, and for
    the only row of a group."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        mean = s[0] + (s - s[0]).mean()
        return _deviation(s, i) / mean if mean > 1e-6 else 0.0

    return _grouped(of_row, scores, mask, groups)


def rloo(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """The row's score minus the mean score of the group's other rows; 0 for the only row of a group."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        others = [s[j] for j in range(len(s)) if j != i]
        return s[i] - sum(others) / len(others) if others else 0.0

    return _grouped(of_row, scores, mask, groups)


def lite_ppo(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """(S - mean) / (std + 1e-6), with S the row's score, the mean over its group, and std over all rows with tokens."""
    every = scores[mask.any(1)].detach()
    divisor = (every.std() if len(every) > 1 else 0.0) + 1e-6
    return _grouped(lambda s, n, i: _deviation(s, i) / divisor, scores, mask, groups)


def qae(scores: Tensor, mask: Tensor, groups: Tensor, *, quantile: float = 0.4) -> Advantages:
    """(S - b) / (std + 1e-6), with S the row's score, std over its group, and b the least of the group's scores that at
    least this part of them do not exceed; 0 for the only row of a group."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        baseline = min(x.item() for x in s if (s <= x).sum().item() / len(s) >= quantile - 1e-9)
        return (s[i] - baseline) / _divisor(s, "std")

    return _grouped(of_row, scores, mask, groups)


def pkpo(scores: Tensor, mask: Tensor, groups: Tensor, *, k: int = 2) -> Advantages:
    """k times the mean of max(S in I) - max(S in I without the row), over the subsets I of k rows of the group with the
    row; k is at most the group's rows, and 0 is for the only row of a group."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        others, size = [x.item() for j, x in enumerate(s) if j != i], min(k, len(s))
        subsets = list(combinations(others, size - 1))
        gains = [max(0.0, s[i].item() - max(subset)) for subset in subsets] if others else [0.0]
        return size * sum(gains) / len(gains)

    return _grouped(of_row, scores, mask, groups)


def opo(scores: Tensor, mask: Tensor, groups: Tensor, *, leave_one_out: bool = False) -> Advantages:
    """The row's score minus the mean score, weighted by length, of its group or (`leave_one_out`) of the group's other
    rows; 0 for the only row of a group."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        rows = [j for j in range(len(s)) if j != i or not leave_one_out]
        return 0.0 if len(s) == 1 else s[i] - sum(s[j] * n[j] for j in rows) / sum(n[j] for j in rows)

    return _grouped(of_row, scores, mask, groups)


def gpg(scores: Tensor, mask: Tensor, groups: Tensor, *, outcomes: Tensor | None = None) -> Advantages:
    """alpha (S - mean), with S the row's score, the mean over its group, and alpha = rows of the batch / rows whose
    outcome is not 0."""
    right = scores if outcomes is None else outcomes
    rows = [b for b in range(len(mask)) if mask[b].any()]
    alpha = len(rows) / max(sum(right[b].item() != 0 for b in rows), 1)
    return _grouped(lambda s, n, i: alpha * _deviation(s, i), scores, mask, groups)


def grpo_passk(scores: Tensor, mask: Tensor, groups: Tensor, *, scale: str = "std") -> Advantages:
    """(best - second) / (std + 1e-6) for the best row of a group; 0 for all others, and where two rows are best."""

    def of_row(s: Tensor, n: Tensor, i: int) -> Tensor | float:
        if len(s) == 1:
            return 0.0
        best, second = sorted(s.tolist(), reverse=True)[:2]
        return (best - second) / _divisor(s, scale) if s[i] == best else 0.0

    return _grouped(of_row, scores, mask, groups)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / std over all tokens of the mask, by the unbiased deviation; 0, or the mean, where all are equal."""
    kept = x.detach()[mask].double()
    if not len(kept):
        return torch.zeros_like(x)
    mean = kept[0] + (kept - kept[0]).mean()
    alike = len(kept) < 2 or bool((kept == kept[0]).all())
    unit = torch.zeros_like(kept) if alike else (kept - mean) / kept.std()
    return torch.zeros_like(x).masked_scatter(mask, (unit if shift_mean else unit + mean).to(x.dtype))


def reinforce_plus_plus_baseline(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
    """The row's score minus the mean score of its group, whitened over the batch's tokens."""
    plain = _grouped(lambda s, n, i: _deviation(s, i), scores, mask, groups)
    return plain._replace(advantages=whiten(plain.advantages, mask))


def gdpo(
    named_scores: Mapping[str, Tensor],
    mask: Tensor,
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    scale: str = "std",
) -> Advantages:
    """The weighted sum of the grpo advantages of each named score, whitened over the batch's tokens."""
    factors = dict.fromkeys(named_scores, 1.0) if weights is None else weights
    terms = [(factor, grpo(named_scores[name], mask, groups, scale=scale)) for name, factor in factors.items()]
    total = sum(factor * term.advantages for factor, term in terms)
    returns = sum(factor * term.returns for factor, term in terms)
    assert isinstance(total, Tensor)
    assert isinstance(returns, Tensor)
    return Advantages(whiten(total, mask), returns)


def along_rows(of_row: Callable[..., tuple[Numbers, Numbers]], mask: Tensor, *columns: Tensor) -> Advantages:
    """Advantages and returns from a function of one row: it gets a list [n] of the row's n tokens in the mask for each
    of the `columns` [B, T], and returns two such lists."""
    results = [torch.zeros_like(columns[0]) for _ in range(2)]
    for b, row in enumerate(mask):
        if row.any():
            found = of_row(*(x[b, row].tolist() for x in columns))
            here = torch.zeros_like(mask).index_put((torch.tensor(b),), row)
            results = [
                x.masked_scatter(here, torch.tensor(numbers, dtype=x.dtype))
                for x, numbers in zip(results, found, strict=True)
            ]
    return Advantages(*(x.detach() for x in results))


def _plus(a: Sequence[float], b: Sequence[float]) -> Numbers:
    return [x + y for x, y in zip(a, b, strict=True)]


def _less(a: Sequence[float], b: Sequence[float]) -> Numbers:
    return [x - y for x, y in zip(a, b, strict=True)]


def _returns(rewards: Numbers, gamma: float) -> Numbers:
    return [sum(gamma ** (j - t) * rewards[j] for j in range(t, len(rewards))) for t in range(len(rewards))]


def _gae(rewards: Numbers, values: Numbers, gamma: float, lam: float) -> Numbers:
    """The sum over l of (gamma lam)^l delta_{t + l} for each token t, delta_t = r_t + gamma V_{t + 1} - V_t (GAE)."""
    v = [*values, 0.0]
    delta = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(len(rewards))]
    return [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(delta))) for t in range(len(delta))]


def token_rewards(scores: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """The score at the last token of each row, minus kl_coef * kl at every token."""

    def of_row(score: Numbers, penalty: Numbers) -> tuple[Numbers, Numbers]:
        last = len(score) - 1
        rewards = [(score[t] if t == last else 0.0) - kl_coef * penalty[t] for t in range(len(score))]
        return rewards, rewards

    every = scores[:, None].expand(mask.shape)
    return along_rows(of_row, mask, every, torch.zeros_like(every) if kl is None else kl).advantages


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The return from each token t on: the sum over l of gamma^l r_{t + l}, along the tokens of the mask."""

    def of_row(r: Numbers) -> tuple[Numbers, Numbers]:
        return _returns(r, gamma), _returns(r, gamma)

    return along_rows(of_row, mask, rewards).advantages


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float | None = None,
    lam_alpha: float | None = None,
) -> Advantages:
    """The sum over l of (gamma lam)^l delta_{t + l}, with delta_t = r_t + gamma V_{t + 1} - V_t. Returns are the values
    plus such a sum with `critic_lam` in place of lam. With `lam_alpha` a row of n tokens has lam =
    max(0, 1 - 1 / (lam_alpha n))."""

    def of_row(r: Numbers, v: Numbers) -> tuple[Numbers, Numbers]:
        own = lam if lam_alpha is None else max(0.0, 1 - 1 / (lam_alpha * len(r)))
        critics = _gae(r, v, gamma, own if critic_lam is None else critic_lam)
        return _gae(r, v, gamma, own), _plus(critics, v)

    return along_rows(of_row, mask, rewards, values)


def td(rewards: Tensor, values: Tensor, mask: Tensor, *, steps: int, gamma: float = 1.0) -> Advantages:
    """The discounted sum of the next `steps` rewards and of the value after them, minus the value before them."""

    def of_row(r: Numbers, v: Numbers) -> tuple[Numbers, Numbers]:
        goals: Numbers = []
        for t in range(len(r)):
            ahead = sum(gamma ** (k - t) * r[k] for k in range(t, min(t + steps, len(r))))
            goals.append(ahead + (gamma**steps * v[t + steps] if t + steps < len(r) else 0.0))
        return _less(goals, v), goals

    return along_rows(of_row, mask, rewards, values)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    correction_weights: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    cut: float = 1.0,
) -> Advantages:
    """V-trace by the recursion in remark 1 of its paper (arXiv:1802.01561), from each row's last token to its first."""

    def of_row(r: Numbers, v: Numbers, w: Numbers) -> tuple[Numbers, Numbers]:
        following = goal = 0.0  # the next state's value and target
        advantages, goals = [], []
        for reward, value, weight in zip(reversed(r), reversed(v), reversed(w), strict=True):
            delta = weight * (reward + gamma * following - value)
            advantages.append(reward + gamma * goal - value)
            goal = value + delta + gamma * lam * min(cut, weight) * (goal - following)
            following = value
            goals.append(goal)
        return advantages[::-1], goals[::-1]

    return along_rows(of_row, mask, rewards, values, correction_weights)


def _turns(row: Sequence[bool]) -> list[list[int]]:
    """The runs of consecutive tokens in a row's mask, each as a list of indices."""
    turns: list[list[int]] = []
    for t, inside in enumerate(row):
        if inside and (t == 0 or not row[t - 1]):
            turns.append([])
        if inside:
            turns[-1].append(t)
    return turns


def turn_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    """GAE with turns as steps: every token of a turn has the turn's advantage. The critic's target at a token is the
    sum of the turn's rewards from the token on, plus gamma ((1 - lam) V + lam (A + V)) with the value V and the
    advantage A of the next turn."""
    advantages, returns = ([[0.0] * mask.shape[1] for _ in mask] for _ in range(2))
    for b, row in enumerate(mask.tolist()):
        turns = _turns(row)
        r = [sum(rewards[b, t].item() for t in turn) for turn in turns]
        v = [values[b, turn[0]].item() for turn in turns]
        of_turns = _gae(r, v, gamma, lam)
        later, following = [*_plus(of_turns, v), 0.0], [*v, 0.0]
        for k, turn in enumerate(turns):
            for place, t in enumerate(turn):
                left = sum(rewards[b, s].item() for s in turn[place:])
                advantages[b][t] = of_turns[k]
                returns[b][t] = left + gamma * ((1 - lam) * following[k + 1] + lam * later[k + 1])
    return Advantages(*(torch.tensor(x, dtype=rewards.dtype).view(mask.shape) for x in (advantages, returns)))


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor) -> Advantages:
    """The sum of the rewards from each token on, minus the row's baseline."""

    def of_row(r: Numbers, baseline: Numbers) -> tuple[Numbers, Numbers]:
        return _less(_returns(r, 1.0), baseline), _returns(r, 1.0)

    return along_rows(of_row, mask, rewards, baselines[:, None].expand(mask.shape))


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Advantages:
    """The discounted sum of the rewards from each token on, whitened over the batch's tokens."""
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return Advantages(whiten(returns, mask), returns)


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    *,
    log_probs: Tensor,
    sum_squared_probs: Tensor,
    correction: Tensor | None = None,
    leave_one_out: bool = False,
) -> Advantages:
    """At the k-th token of a row G_k - sum_i G_ij W_ij / sum_i W_ij, with returns G and accumulated weights W. The sums
    are over the rows i of the group that have a j-th token, without the row itself if `leave_one_out`. j is k or, if
    smaller, the last token that another row has too. 0 for the only row of a group."""
    places = [[t for t, inside in enumerate(row) if inside] for row in mask.tolist()]
    rho = torch.ones_like(rewards) if correction is None else correction
    terms = rho**2 * (1 - 2 * log_probs.exp() + sum_squared_probs)
    advantages, returns = ([[0.0] * mask.shape[1] for _ in mask] for _ in range(2))
    for b, own in enumerate(places):
        for k, t in enumerate(own):
            returns[b][t] = sum(rewards[b, s].item() for s in own[k:])
            others = [i for i, at in enumerate(places) if i != b and groups[i] == groups[b] and at]
            if not others:
                continue
            j = min(k, max(len(places[i]) for i in others) - 1)
            rows = [i for i in (*others, *(() if leave_one_out else (b,))) if len(places[i]) > j]
            weights = {i: sum(terms[i, s].item() for s in places[i][: j + 1]) for i in rows}
            to_go = {i: sum(rewards[i, s].item() for s in places[i][j:]) for i in rows}
            advantages[b][t] = returns[b][t] - sum(to_go[i] * w for i, w in weights.items()) / sum(weights.values())
    return Advantages(*(torch.tensor(x, dtype=rewards.dtype).view(mask.shape) for x in (advantages, returns)))


def reverse_kl(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    *,
    scores: Tensor | None = None,
    groups: Tensor | None = None,
    gamma: float = 0.0,
    coef: float = 1.0,
    limit: float | None = None,
    score_coef: float = 0.0,
) -> Advantages:
    """-coef times the discounted sum of log_probs - teacher_log_probs (cut to `limit`) from each token on, plus
    score_coef times the advantage of `rloo`."""

    def of_row(own: Numbers, teacher: Numbers) -> tuple[Numbers, Numbers]:
        apart = _less(own, teacher)
        bounded = apart if limit is None else [max(-limit, min(limit, x)) for x in apart]
        to_go = [-coef * x for x in _returns(bounded, gamma)]
        return to_go, to_go

    found = along_rows(of_row, mask, log_probs, teacher_log_probs)
    if scores is None or groups is None or score_coef == 0.0:
        return found
    return found._replace(advantages=found.advantages + score_coef * rloo(scores, mask, groups).advantages)
