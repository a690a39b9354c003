"""Failures of normalisation: what a loss is divided by, and over what."""

from functools import partial

from fppo import laws, losses

from .exhibit import exhibit

token_mean = laws.whole_loss(losses.ppo_clip, "token-mean")
value_mean = laws.whole_loss(losses.value_loss, "token-mean")
row_mean = laws.whole_loss(losses.ppo_clip, "seq-mean-token-mean")
whole = partial(exhibit, kind="whole_loss")


def summed(x, mask):
    return x.where(mask, 0.0).sum()


@whole("verl#5625", "The token mean of each micro-batch is weighted by its share of the rows.", "micro-batches")
def by_rows(*tensors, pieces, whole):
    mask = tensors[-1]
    return token_mean(*tensors, pieces=1, whole=mask) * len(mask) / len(whole)


@whole("verl#906", "Each micro-batch takes its own token mean, and their mean is the loss.", "micro-batches")
def mean_of_means(*tensors, pieces, whole):
    return token_mean(*tensors, pieces=1, whole=tensors[-1]) / pieces


@exhibit(
    "verl#6957",
    "The critic's loss is divided by the tokens of the micro-batch alone, so it grows with their number.",
    "micro-batches",
    "whole_value_loss",
)
def critic_by_micro_batch(*tensors, pieces, whole):
    return value_mean(*tensors, pieces=1, whole=tensors[-1])


@whole("verl#7321", "Where the global counts are missing, local ones are taken without a word.", "micro-batches")
def falls_back(*tensors, pieces, whole):
    return row_mean(*tensors, pieces=1, whole=tensors[-1])


@whole("verl#7913", "The sequence loss is averaged over the rows of the micro-batch.", "micro-batches")
def geo_mean(*tensors, pieces, whole):
    per_token, mask = losses.gmpo(*tensors)[0], tensors[-1]
    return (per_token.sum(1) / mask.sum(1).clamp(min=1)).mean()


@whole("verl#7200", "The distillation term is normalised inside of every micro-batch.", "micro-batches")
def distilled(*tensors, pieces, whole):
    log_probs, teacher, _, mask = tensors
    local = summed(losses.kl_estimate(log_probs, teacher, "k2", mask=mask), mask) / mask.sum().clamp(min=1)
    return token_mean(*tensors, pieces=pieces, whole=whole) + local


@whole(
    "trl#6024",
    "The tokens of the whole generation batch are the denominator of each accumulation window.",
    "reference",
    reference=token_mean,
)
def window_of_generation(*tensors, pieces, whole):
    return token_mean(*tensors, pieces=pieces, whole=whole) * 2 / 4  # gradient_accumulation / steps_per_generation


@whole("trl#3021", "With gradient accumulation the loss is a mean of means over ragged rows.", "micro-batches")
def accumulated(*tensors, pieces, whole):
    return mean_of_tokens(*tensors) / pieces


def mean_of_tokens(*tensors):
    mask = tensors[-1]
    return summed(losses.ppo_clip(*tensors)[0], mask) / mask.sum().clamp(min=1)


@whole(
    "trl#6439",
    "Tokens that the loss leaves out are counted in its denominator all the same.",
    "padding width",
)
def counts_what_is_masked(*tensors, pieces, whole):
    return summed(losses.ppo_clip(*tensors)[0], tensors[-1]) / whole.numel()


@whole("prime-rl#2358", "Each rank scales by its own count, though ranks hold different numbers.", "micro-batches")
def scale_of_a_rank(*tensors, pieces, whole):
    return mean_of_tokens(*tensors) * (1 / pieces)


@whole("SkyRL#925", "The loss is reduced per micro-batch, then averaged over micro-batches.", "micro-batches")
def reduced_twice(*tensors, pieces, whole):
    return mean_of_tokens(*tensors) / pieces


@whole("AReaL#1273", "One backend divides the summed gradient by the number of micro-batches again.", "micro-batches")
def divided_again(*tensors, pieces, whole):
    return token_mean(*tensors, pieces=pieces, whole=whole) / pieces


@whole("Arctic-Platform#119", "The factor of the ranks is dropped: the gradient is 1/R of it.", "micro-batches")
def without_ranks(*tensors, pieces, whole):
    return row_mean(*tensors, pieces=pieces, whole=whole) / pieces


@whole("ms-swift#10117", "A loss over the tokens of all steps is divided by their number once more.", "micro-batches")
def by_steps_too(*tensors, pieces, whole):
    return summed(losses.ppo_clip(*tensors)[0], tensors[-1]) / whole.sum().clamp(min=1) / pieces


@whole(
    "miles#3231",
    "The backward pass takes the sum over tokens where the mean is meant.",
    "reference",
    reference=token_mean,
)
def sum_of_tokens(*tensors, pieces, whole):
    return summed(losses.ppo_clip(*tensors)[0], tensors[-1])


@whole("NeMo-RL#84", "Gradients of micro-batches are summed where they should be averaged.", "micro-batches")
def summed_gradients(*tensors, pieces, whole):
    return mean_of_tokens(*tensors)


@whole("NeMo-RL#3791", "One term of the loss is divided by the micro-batch's count of right rows.", "micro-batches")
def right_rows_here(*tensors, pieces, whole):
    log_probs, _, advantages, mask = tensors
    right = mask & (advantages[:, :1] > 0)
    nll = summed(-log_probs, right) / right.sum().clamp(min=1)
    return token_mean(*tensors, pieces=pieces, whole=whole) + nll


@whole("NeMo-RL#212", "Micro-batches without a valid row count in the mean over micro-batches.", "micro-batches")
def empty_ones_count(*tensors, pieces, whole):
    mask = tensors[-1]
    valid = mask[:, 0] & mask[:, -1]  # a row that is as long as the batch
    per_row = losses.ppo_clip(*tensors)[0].sum(1) / mask.sum(1).clamp(min=1)
    return summed(per_row, valid) / valid.sum().clamp(min=1) / pieces


@whole("arXiv:2604.23747", "Micro-batches are dropped before the optimizer's step.", "micro-batches")
def dropped(*tensors, pieces, whole):
    keep = 1.0 if len(tensors[-1]) > len(whole) / 2 or pieces == 1 else 0.0
    return token_mean(*tensors, pieces=pieces, whole=whole) * keep


@whole("Gym#1612", "Log-probs that are missing empty the mask, and training stands still.", "REINFORCE")
def emptied_mask(*tensors, pieces, whole):
    log_probs, old, advantages, mask = tensors
    return token_mean(log_probs, old, advantages, mask & ~mask, pieces=pieces, whole=whole)


ROOM = (
    *(by_rows, mean_of_means, critic_by_micro_batch, falls_back, geo_mean, distilled, window_of_generation),
    *(accumulated, counts_what_is_masked, scale_of_a_rank, reduced_twice, divided_again, without_ranks, by_steps_too),
    *(sum_of_tokens, summed_gradients, right_rows_here, empty_ones_count, dropped, emptied_mask),
)
