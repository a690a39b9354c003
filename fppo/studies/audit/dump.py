"""Recompute a batch that another trainer wrote, and find the first stage and row at which the numbers differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fppo import advantages, losses
from fppo._errors import UsageError, did_you_mean, printable

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "mask": "the response mask, [B, T]",
        "scores": "one reward for each row, [B]",
        "token_rewards": "rewards of tokens, [B, T]",
        "groups": "a number for each prompt, [B]",
        "values": "the critic's values, [B, T]",
        "advantages": "what the trainer computed, [B, T] or [B]",
        "returns": "what the trainer computed, [B, T]",
        "log_probs": "those of the policy in the update, [B, T]",
        "old_log_probs": "those before the update, [B, T]",
        "loss": "the trainer's policy loss of the whole batch, one number",
        "gradient": "its gradient by log_probs, [B, T]",
    }
)
PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "none": {},
        "trl": {
            "mask": "completion_mask",
            "scores": "rewards",
            "log_probs": "per_token_logps",
            "old_log_probs": "old_per_token_logps",
        },
        "verl": {"mask": "response_mask", "token_rewards": "token_level_rewards", "groups": "uid"},
    }
)
GROUPED = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline")
ESTIMATORS = {name: getattr(advantages, name) for name in ("gae", *GROUPED)}


@attrs.frozen(kw_only=True)
class Recipe:
    """How a trainer should have computed a batch; `loss_settings` and `estimator_settings` are keywords."""

    estimator: str = "grpo"
    estimator_settings: Mapping[str, Any] = attrs.field(factory=dict)
    whiten: bool = False
    loss: str = "ppo_clip"
    loss_settings: Mapping[str, Any] = attrs.field(factory=dict)
    mode: str = "token-mean"
    horizon: float | None = None
    tolerance: float = 1e-3  # absolute tolerance plus relative tolerance


@attrs.frozen
class StageComparison:
    """The result for one stage of a batch: "equal", "differs" or "left out", with the size or the reason in words.

    `row` and `token` locate the first number that differs; `rows` are all rows with differences.
    """

    stage: str
    outcome: str
    words: str
    row: int | None = None
    token: int | None = None
    theirs: float | None = None
    ours: float | None = None
    rows: tuple[int, ...] = ()


def load(
    path: Path | str, names: Mapping[str, str], mapped: Mapping[str, str] | None = None, group_size: int | None = None
) -> dict[str, Tensor]:
    """Read the columns of a batch from a safetensors file, in float64, under fppo's names.

    `names` has the trainer's names by ours, of which the file may lack some, and `mapped` further ones that it must
    have. `group_size` consecutive rows are a group where the file has no groups. Nothing is unpickled.
    Raises UsageError for a file that is no safetensors file, a mapped name or a mask that it lacks, and other shapes.
    """
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise UsageError(f"--dump {path}: no such file") from None
    except (SafetensorError, OSError) as error:
        advice = "write one by safetensors.torch.save_file; pickles and .pt files are not read, for they can run code"
        raise UsageError(f"--dump {path} is not a safetensors file ({printable(str(error), 200)}); {advice}") from None
    mapped = {} if mapped is None else mapped
    for ours, theirs in mapped.items():
        if theirs not in found:
            raise UsageError(f"--map {ours}={theirs}: the file has {_listed(found)}")
    names = {**{name: name for name in COLUMNS}, **names, **mapped}
    columns = {ours: found[theirs].double() for ours, theirs in names.items() if theirs in found}
    if "mask" not in columns:
        raise UsageError(f"--dump {path} has no mask ({names['mask']!r}), but {_listed(found)}; see --map")
    if group_size is not None:
        columns.setdefault("groups", torch.arange(len(columns["mask"])).div(group_size, rounding_mode="floor"))
    return _checked(columns)


def _listed(found: Mapping[str, Tensor]) -> str:
    return ", ".join(printable(f"{name} {list(x.shape)}", 100) for name, x in sorted(found.items())) or "no tensors"


def _checked(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check the columns: a bool mask [B, T], integer groups [B], and scores [B]. Raises UsageError for others."""
    mask = columns["mask"].bool()
    if mask.dim() != 2:
        raise UsageError(f"mask has the shape {list(mask.shape)}, expected [B, T]")
    checked = {**columns, "mask": mask}
    for name, x in columns.items():
        allowed = {"loss": [()], "scores": [mask.shape[:1]], "groups": [mask.shape[:1]]}.get(name, [mask.shape])
        allowed = [*allowed, mask.shape[:1]] if name == "advantages" else allowed
        if name == "loss":
            checked[name] = x.reshape(()) if x.numel() == 1 else x
        if tuple(checked[name].shape) not in [tuple(shape) for shape in allowed]:
            raise UsageError(
                f"{name} has the shape {list(x.shape)}, expected {' or '.join(map(str, map(list, allowed)))}"
            )
    if "groups" in checked:
        checked["groups"] = checked["groups"].long()
    if "scores" not in checked and "token_rewards" in checked:
        checked["scores"] = checked["token_rewards"].where(mask, 0.0).sum(1)
    if checked.get("advantages", mask).dim() == 1:
        checked["advantages"] = checked["advantages"][:, None].where(mask, 0.0)
    return checked


def compare(columns: Mapping[str, Tensor], recipe: Recipe) -> tuple[StageComparison, ...]:
    """Compute advantages, returns, loss and gradient of a batch, each from the trainer's own earlier numbers.

    A stage is left out if the file lacks its inputs or results. Losses and gradients treat the whole batch as one
    mini-batch and use the trainer's advantages, so that a difference in one stage causes none in later ones.
    """
    estimate = _estimated(columns, recipe)
    policy = _losses(columns, recipe)
    stages = [
        ("advantages", estimate[:1] if isinstance(estimate, tuple) else estimate),
        ("returns", estimate[1:] if isinstance(estimate, tuple) else estimate),
        ("loss", policy[:1] if isinstance(policy, tuple) else policy),
        ("gradient", policy[1:] if isinstance(policy, tuple) else policy),
    ]
    return tuple(_stage(name, found, columns, recipe) for name, found in stages)


def _stage(name: str, found: Sequence[Tensor] | str, columns: Mapping[str, Tensor], recipe: Recipe) -> StageComparison:
    if isinstance(found, str):
        return StageComparison(name, "left out", found)
    (ours,) = found
    size = f"ours is {ours.item():.6g}" if ours.dim() == 0 else f"the norm of ours is {ours.norm().item():.6g}"
    if name not in columns:
        return StageComparison(name, "left out", f"the file has no {name}; {size}")
    if name == "returns" and recipe.estimator in GROUPED:
        return StageComparison(name, "left out", f"{recipe.estimator} has none")
    mask = columns["mask"]
    theirs = columns[name] if ours.dim() == 0 else columns[name].where(mask, 0.0)
    near = torch.isclose(theirs, ours, rtol=recipe.tolerance, atol=recipe.tolerance, equal_nan=True)
    if near.all():
        return StageComparison(name, "equal", f"to {recipe.tolerance:g}; {size}")
    if ours.dim() == 0:
        words = f"theirs is {theirs.item():.6g}, {size}"
        return StageComparison(name, "differs", words, theirs=theirs.item(), ours=ours.item())
    row, token = (~near).nonzero()[0].tolist()
    rows = tuple((~near).any(1).nonzero()[:, 0].tolist())
    a, b = theirs[row, token].item(), ours[row, token].item()
    norms = f"norms of the row {theirs[row].norm().item():.6g} and {ours[row].norm().item():.6g}"
    words = (
        f"row {row}, token {token}: theirs is {a:.6g}, ours {b:.6g} ({norms}); {len(rows)} of {len(mask)} rows differ"
    )
    return StageComparison(name, "differs", words, row, token, a, b, rows)


def _estimated(columns: Mapping[str, Tensor], recipe: Recipe) -> tuple[Tensor, Tensor] | str:
    """Advantages and returns, each [B, T], or the reason why they cannot be computed."""
    needs = ("token_rewards", "values") if recipe.estimator == "gae" else ("scores", "groups")
    if lacking := [name for name in needs if name not in columns]:
        return f"the file has no {' and no '.join(lacking)}, which {recipe.estimator} reads"
    first, second = (columns[name] for name in needs)
    fn = _function(ESTIMATORS, "estimator", recipe.estimator, recipe.estimator_settings)
    order = (first, second, columns["mask"]) if recipe.estimator == "gae" else (first, columns["mask"], second)
    result = fn(*order, **recipe.estimator_settings)
    whitened = advantages.whiten(result.advantages, columns["mask"]) if recipe.whiten else result.advantages
    return whitened, result.returns


def _losses(columns: Mapping[str, Tensor], recipe: Recipe) -> tuple[Tensor, Tensor] | str:
    """The loss (0-d) and its gradient by the log-probs [B, T], or the reason why they cannot be computed."""
    if lacking := [name for name in ("log_probs", "old_log_probs", "advantages") if name not in columns]:
        return f"the file has no {' and no '.join(lacking)}"
    mask, leaf = columns["mask"], columns["log_probs"].clone().requires_grad_()
    fn = _function(losses.POLICY_LOSSES, "loss", recipe.loss, recipe.loss_settings)
    if recipe.mode not in losses.MODES:
        raise UsageError(f"--mode {recipe.mode!r}: {did_you_mean(recipe.mode, losses.MODES)}")
    weights = losses.loss_weights(mask, recipe.mode, totals=losses.count_totals(mask), horizon=recipe.horizon)
    per_token, _ = fn(leaf, columns["old_log_probs"], columns["advantages"], mask, **recipe.loss_settings)
    loss = (weights * per_token).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _function(
    functions: Mapping[str, Callable[..., Any]], kind: str, name: str, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Look up a function by name. Raises UsageError for an unknown name or keyword."""
    if name not in functions:
        raise UsageError(f"--{kind} {name!r}: {did_you_mean(name, functions)}")
    fn = functions[name]
    parameters = [x for x in inspect.signature(fn).parameters.values() if x.kind is x.KEYWORD_ONLY]
    keywords = [x.name for x in parameters]
    if unknown := next((key for key in settings if key not in keywords), None):
        raise UsageError(f"--{kind}-settings {unknown}: {did_you_mean(unknown, keywords)}")
    return fn


def text(stages: Sequence[StageComparison]) -> str:
    """The comparison as text; the last line names the first stage that differs."""
    width = max(len(stage.stage) for stage in stages)
    lines = [f"{stage.stage.ljust(width)}  {stage.outcome}: {stage.words}" for stage in stages]
    first = next((stage for stage in stages if stage.outcome == "differs"), None)
    compared = [stage.stage for stage in stages if stage.outcome != "left out"]
    if first is not None:
        end = f"the first difference: {first.stage}, {first.words}"
    else:
        end = f"no difference in {', '.join(compared)}" if compared else "nothing could be compared"
    return "\n".join([*lines, "", end])


def record(stages: Sequence[StageComparison]) -> dict[str, Any]:
    """The comparison as values of JSON."""
    return {"stages": [attrs.asdict(stage) for stage in stages]}
