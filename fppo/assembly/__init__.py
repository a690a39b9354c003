"""From settings to a run: models, prompts, rewards, engine and stages, bound once."""
