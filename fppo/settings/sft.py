"""The settings of `fppo sft`: those of the run that it reads, and the checks of its own section."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.fields import MOST_ROWS, MOST_TOKENS, Problem, at_least, at_most, nonempty, setting
from fppo.settings.learning import OptimizerSettings, TokenBudget, WeightMode, auto_or_at_least, passes_of


@attrs.frozen(kw_only=True)
class SftSettings:
    """How fppo sft imitates responses. Of the other sections it reads model, data, eval, mesh, checkpoint, digest and
    log."""

    response: str = setting("response", nonempty("give a field of the rows, or a template with {field} in it"))
    """The field that holds the response to data.prompt, or a template like "{reasoning} #### {answer}"."""
    messages: str | None = setting(None)
    """In place of data.prompt and response: the field with a conversation that ends with the assistant's message."""
    turns: Literal["all", "last"] = setting("all")
    """Of a conversation, imitate all turns of the assistant, or the last one."""
    epochs: int | None = setting(None, at_least(1))
    """Passes over the data, in place of steps; None: as many updates as steps says."""
    batch_size: int = setting(64, at_least(1), at_most(MOST_ROWS))
    """Sequences of an update."""
    max_tokens: int = setting(2048, at_least(2), at_most(MOST_TOKENS))
    """The longest row, prompt and responses, in tokens; data.over_long says what happens to longer ones."""
    weight_mode: WeightMode = setting("token-mean")
    """How per-token losses are weighted into one."""
    horizon: int | None = setting(None, at_least(1))
    """The constant length that seq-mean-token-sum-norm divides by."""
    micro_batch_size: int | None = setting(None, at_least(0))
    """Sequences per forward and backward pass; 0 or None: split by token_budget."""
    token_budget: TokenBudget = setting(None, auto_or_at_least(0))
    """Tokens of a pass, rows packed without padding; auto: at most 16384, as fit; None: 16384, or micro_batch_size."""
    optimizer: OptimizerSettings = attrs.field(factory=lambda: OptimizerSettings(lr=1e-5))
    """The optimizer and its learning rate."""

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """(sequences, tokens) per forward and backward pass; one of them is None."""
        return passes_of(self.micro_batch_size, self.token_budget)


READ = (  # the settings and sections that fppo sft reads
    *("output_dir", "seed", "steps", "module_dirs", "resume", "device", "check", "model", "data", "sft"),
    *("eval.every", "eval.before", "eval.max_prompts", "mesh", "checkpoint", "digest", "log"),
)
_NOT_READ = (  # of these sections
    *("data.ground_truth", "data.sampler", "data.curriculum", "data.max_prompt_tokens", "data.shuffle"),
    *("model.critic_path", "model.ref_path", "model.ref_dtype", "model.ref_offload"),
    *("model.lora.critic_rank", "model.lora.critic_path"),
    *("model.teacher_path", "model.teacher_decay", "model.teacher_dtype", "model.teacher_offload"),
    *("model.teachers", "model.teacher_by", "model.teacher_weights"),
    *("model.share_prompts", "model.lora.send"),
)


def is_read(problem: Problem) -> bool:
    """Whether a problem concerns a setting that fppo sft reads."""
    inside = any(problem.path == path or problem.path.startswith(f"{path}.") for path in READ)
    return inside and not any(problem.path == path or problem.path.startswith(f"{path}.") for path in _NOT_READ)
