"""Objects of the kinds that adapters wrap, which worker processes import by name."""

import random


class GuessNumber:
    """Gym's kind: a number of 1 to 8, drawn by the global generator, in at most three guesses."""

    def reset(self, seed=None):
        self.number, self.left = random.randint(1, 8), 3
        return "Guess a number of 1 to 8.", {}

    def step(self, action):
        self.left -= 1
        guess = int(action) if action.isdigit() else 0
        right = guess == self.number
        info = {"left": self.left, "x": "y"}
        return "higher" if guess < self.number else "lower", float(right), right, self.left == 0, info


class Weather:
    """TRL's kind: a class of tools."""

    def reset(self, city="Oslo", **others):
        self.city, self.asked = city, []
        return f"What is the weather in {city}?"

    def weather(self, city: str) -> str:
        """Looks the weather up.

        Args:
            city: the city.
        """
        self.asked.append(city)
        return f"rain in {city}"

    def _hidden(self):
        return "secret"

    def get_reward(self):
        return float(self.asked == [self.city])


def first_action(text, rng):
    """The first of the moves that a game lists in brackets, or one drawn."""
    moves = [word for word in text.replace("'", " ").split() if word.startswith("[") and word.endswith("]")]
    return rng.choice(moves[-2:]) if moves else "[check]"


def said(text):
    return {"text": text}


def echoed(seen):
    return seen["text"]
