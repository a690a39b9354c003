"""A new policy loss: written, put through the laws, and used for updates of a small model on synthetic data."""

import torch
from torch import Tensor

from fppo import advantages, laws, metrics, models, quickstart, tree
from fppo.batch import Column, Experience
from fppo.key import Key
from fppo.steps import Forward, Loop, MicroBatching, UpdateActor, adamw, compute_log_probs, init_state


def spo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor, radius: float = 0.2) -> tuple[Tensor, metrics.Metrics]:
    """Simple Policy Optimization (arXiv:2401.16025): instead of a clip, a parabola that is least at r = 1 +- radius."""
    new, old, adv = (x.where(mask, 0.0) for x in (new, old.detach(), adv.detach()))
    ratio = (new - old).clamp(-20, 20).exp()
    per_token = -adv * ratio + adv.abs() * (ratio - 1) ** 2 / (2 * radius)
    return per_token.where(mask, 0.0), {"actor/ratio": metrics.masked_mean(ratio, mask)}


def synthetic(rows: int, prompt: int, response: int, vocabulary: int, key: Key) -> Experience:
    """Random tokens; the score of a row is its share of even ones, its advantage is GRPO's in groups of four."""
    tokens = torch.randint(vocabulary, (rows, prompt + response), generator=key.generator())
    mask = torch.arange(response) < torch.randint(1, response + 1, (rows, 1), generator=key.fold("length").generator())
    scores = ((tokens[:, prompt:] % 2 == 0) & mask).sum(1) / mask.sum(1)
    number, real = torch.arange(rows), torch.cat([torch.ones(rows, prompt, dtype=torch.bool), mask], 1)
    advantage, returns = advantages.grpo(scores, mask, number // 4)
    none, zeros = Column([None] * rows), torch.zeros_like(returns)
    return Experience(
        **dict.fromkeys(("ids", "ground_truth", "source", "extras", "finish"), none),
        **dict.fromkeys(("rollout_log_probs", "sampling_log_probs", "old_log_probs", "token_rewards"), zeros),
        tokens=tokens,
        attention_mask=real,
        response_mask=mask,
        row_ids=number,
        groups=number // 4,
        versions=torch.zeros_like(number),
        scores=scores,
        named_scores={},
        advantages=advantage,
        returns=returns,
    )


def main() -> None:
    laws.check_policy_loss(spo)  # the loss alone; a broken one is shown with the smallest batch on which it is broken
    laws.check_update(spo, modes=("token-mean", "seq-mean-token-mean"))  # and the gradient of a whole model
    model = quickstart.small_model(32, width=32)
    forward, optimizer, cut = Forward(model), adamw(lambda step: 3e-3), MicroBatching(token_budget=256)
    state, batch = init_state(models.init_params(model, Key(0)), optimizer), synthetic(64, 4, 12, 32, Key(1))
    old = compute_log_probs(state.params, batch, forward=forward, micro_batching=cut)
    batch, loop = tree.replace(batch, old_log_probs=old), Loop(mini_batch_size=32, micro_batching=cut, epochs=4)
    state, report = UpdateActor(forward=forward, loss_fn=spo, loop=loop, optimizer=optimizer)(state, batch)
    moved = compute_log_probs(state.params, batch, forward=forward, micro_batching=cut) - old
    numbers = metrics.report(report) | {"advantages * change of log-probs": (moved * batch.advantages).sum().item()}
    print("spo keeps the laws.", *(f"{name:>34} {x:10.4g}" for name, x in numbers.items()), sep="\n")


if __name__ == "__main__":
    main()
