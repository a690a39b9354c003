"""One PPO step beside the same work in plain transformers and torch: seconds and peak memory by stage, as ratios.

    python experiments/bench/ppo_step.py

Both sides run the same weights on the same rows, in turn, in one process; medians. The peer: model.generate, padded
forward passes in micro-batches of the same rows, autograd and torch.optim.AdamW(fused=True) with clip_grad_norm_.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from bench_tools import Timing, measure, table
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen2ForTokenClassification

from fppo import batch as batches
from fppo import losses, models
from fppo.batch import Column, Experience, Prompts
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels

SIZES = {  # width, layers, vocabulary
    "1M": (128, 4, 77),
    "16M": (384, 6, 8192),
}
ROWS, PROMPT, RESPONSE, MICRO = 64, 64, 128, 16


def qwen(width: int, layers: int, vocabulary: int) -> Qwen2Config:
    """A Qwen2 of this shape."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def prompts_of(vocabulary: int) -> Prompts:
    """Prompts of 8 to 64 random tokens."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, PROMPT + 1, (ROWS,), generator=g)
    mask = torch.arange(PROMPT) >= PROMPT - lengths[:, None]
    tokens = torch.randint(vocabulary // 2, vocabulary, (ROWS, PROMPT), generator=g).where(mask, 0)
    blank = Column([None] * ROWS)
    return Prompts(
        tokens=tokens,
        attention_mask=mask,
        row_ids=torch.arange(ROWS),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )


def experience_of(prompts: Prompts, vocabulary: int, padding: float) -> Experience:
    """Responses such that `padding` of the whole [B, S] is padding and one row is full."""
    g = torch.Generator().manual_seed(1)
    width = PROMPT + RESPONSE
    wanted = (1 - padding) * ROWS * width - prompts.attention_mask.sum().item()
    draws = torch.rand(ROWS, generator=g).sort().values
    low, high = 0.0, 50.0
    for _ in range(60):  # the exponent of the draws that gives the wanted number of tokens
        power = (low + high) / 2
        lengths = (draws**power * RESPONSE).round().clamp(min=1)
        low, high = (power, high) if lengths.sum() > wanted else (low, power)
    lengths = lengths.long()[torch.randperm(ROWS, generator=g)]
    lengths[0] = RESPONSE
    mask = torch.arange(RESPONSE) < lengths[:, None]
    tokens = torch.randint(2, vocabulary, (ROWS, RESPONSE), generator=g).where(mask, 0)
    noise = torch.randn(ROWS, RESPONSE, generator=g).where(mask, 0.0)
    fields = dict.fromkeys(("rollout_log_probs", "sampling_log_probs", "old_log_probs"), -4.0 * mask)
    fields |= dict.fromkeys(("token_rewards", "advantages", "returns", "values"), noise)
    return batches.extend(
        Experience,
        prompts,
        tokens=torch.cat([prompts.tokens, tokens], 1),
        attention_mask=torch.cat([prompts.attention_mask, mask], 1),
        response_mask=mask,
        groups=torch.arange(ROWS),
        versions=torch.zeros(ROWS, dtype=torch.int64),
        finish=Column(["stop"] * ROWS),
        scores=torch.zeros(ROWS),
        named_scores={},
        **fields,
    )


def ours(model: Any, params: Any, critic: Any, critic_params: Any, batch: Experience) -> dict[str, Callable[[], Any]]:
    """The stages as fppo runs them."""
    cut, policy, value = MicroBatching(token_budget=2048), Forward(model), Forward(critic)
    loop = Loop(mini_batch_size=ROWS, micro_batching=cut)
    optimizer = adamw(schedule("constant", 1e-5))
    actor_state, critic_state = init_state(params, optimizer), init_state(critic_params, optimizer)
    return {
        "log-probs": lambda: compute_log_probs(params, batch, forward=policy, micro_batching=cut),
        "values": lambda: compute_values(critic_params, batch, forward=value, micro_batching=cut),
        "update actor": lambda: UpdateActor(forward=policy, loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)(
            actor_state, batch
        ),
        "update critic": lambda: UpdateCritic(forward=value, loop=loop, optimizer=optimizer)(critic_state, batch),
    }


def plain(module: Any, critic: Any, batch: Experience) -> dict[str, Callable[[], Any]]:
    """The same stages on padded rows with transformers modules and a torch optimizer."""
    tokens, attention, mask = batch.tokens, batch.attention_mask.long(), batch.response_mask
    labels, count = tokens[:, -RESPONSE:], batch.response_mask.sum()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True) for m in (module, critic)}
    slices = [slice(i, i + MICRO) for i in range(0, ROWS, MICRO)]

    def outputs(m: Any, s: slice) -> torch.Tensor:
        logits = m(input_ids=tokens[s], attention_mask=attention[s], position_ids=positions[s]).logits
        return logits[:, -RESPONSE - 1 : -1]

    def log_probs(s: slice) -> tuple[torch.Tensor, torch.Tensor]:
        logs = F.log_softmax(outputs(module, s), -1)
        return logs.gather(-1, labels[s, :, None])[..., 0], -(logs.exp() * logs).sum(-1)

    def policy(s: slice) -> torch.Tensor:
        new, _ = log_probs(s)
        ratio, advantages = (new - batch.old_log_probs[s]).exp(), batch.advantages[s]
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        return loss.where(mask[s], 0.0).sum() / count

    def value(s: slice) -> torch.Tensor:
        error = outputs(critic, s)[..., 0] - batch.returns[s]
        return 0.5 * error.square().where(mask[s], 0.0).sum() / count

    def update(m: Any, loss: Callable[[slice], torch.Tensor]) -> None:
        optimizers[m].zero_grad()
        for s in slices:
            loss(s).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizers[m].step()

    @torch.no_grad()
    def every(fn: Callable[[slice], Any]) -> list[Any]:
        return [fn(s) for s in slices]

    return {
        "log-probs": lambda: every(lambda s: log_probs(s)[0]),
        "values": lambda: every(lambda s: outputs(critic, s)),
        "update actor": lambda: update(module, policy),
        "update critic": lambda: update(critic, value),
    }


def rollouts(model: Any, params: Any, module: Any, prompts: Prompts, vocabulary: int) -> dict[str, Callable[[], Any]]:
    """Sampling by both engines, with so many stop tokens that lengths are ragged: geometric, a third of the limit."""
    stops = tuple(range(1, 1 + max(round(vocabulary * 3 / RESPONSE), 1)))
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    sampling = Sampling(max_tokens=RESPONSE, stop_token_ids=stops)
    settings = GenerationConfig(
        do_sample=True, max_new_tokens=RESPONSE, eos_token_id=list(stops), pad_token_id=0, top_k=0, top_p=1.0
    )
    inputs = {"input_ids": prompts.tokens, "attention_mask": prompts.attention_mask.long()}
    lengths: list[float] = []

    def generate() -> int:
        rollout = engine.generate(params, Ask(prompts, sampling, Key(len(lengths)), version=0))
        lengths.append(rollout.response_mask.sum().item())
        return int(lengths[-1])

    def peer() -> int:
        torch.manual_seed(len(lengths))
        new = module.generate(**inputs, generation_config=settings)[:, PROMPT:]
        return int((new != 0).sum())

    return {"ours": generate, "plain": peer}


def main() -> None:
    """Prints one table per model size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--padding", type=float, default=0.5, help="the share of padding in the batch")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each stage; the median counts")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch uses")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for size, (width, layers, vocabulary) in SIZES.items():
        config = qwen(width, layers, vocabulary)
        model, critic = models.build(config), models.build(config, "value")
        params, critic_params = models.init_params(model, Key(0)), models.init_params(critic, Key(1))
        with torch.device("cpu"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
            head = Qwen2ForTokenClassification(copy.deepcopy(config))
        module.load_state_dict(params, strict=False)
        prompts = prompts_of(vocabulary)
        batch = experience_of(prompts, vocabulary, options.padding)
        mine, theirs = ours(model, params, critic, critic_params, batch), plain(module.eval(), head.eval(), batch)
        rows: list[tuple[str, Timing, Timing]] = []
        pair = rollouts(model, params, module, prompts, vocabulary)
        rows.append(("rollout, per token", *measure(pair["ours"], pair["plain"], repeats=options.repeats, per=True)))
        for stage in mine:
            rows.append((stage, *measure(mine[stage], theirs[stage], repeats=options.repeats)))
        real = batch.attention_mask.float().mean().item()
        print(f"\n{size} parameters, {ROWS} rows of {PROMPT} + {RESPONSE} tokens, {1 - real:.0%} padding")
        print(table(rows))


if __name__ == "__main__":
    main()
