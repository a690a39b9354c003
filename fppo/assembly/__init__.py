"""From settings to a run: models, prompts, rewards, engine and stages, bound once.

In: `TrainSettings` and the ranks of a mesh. Out: an `Assembly`, with the state before the first step, the `Program` and
what evaluates. All problems that only opening files shows are raised at once, before any work.
Begin with `run.assemble`; `program` binds stages, `roles` makes models, `trials` calls each part once.
"""
