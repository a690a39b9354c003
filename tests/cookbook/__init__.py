"""The recipes of tinker-cookbook, as its newest release has them, against `fppo serve --tinker`."""
