"""Kuhn poker from nothing, in an environment of one's own, against a player who bets the more, the higher his card.

The policy says p (pass) or b (bet); anything else costs two chips. Each turn is compared with the same turn of games
that were dealt alike. The score is in chips a game, of which the best replies win 0.112.
"""

import random
from pathlib import Path

import tyro

from fppo import models, quickstart
from fppo.commands.cli import main as fppo
from fppo.environments import Begin, Step
from fppo.key import Key

BETS = {"J": 0.1, "Q": 0.5, "K": 0.9}  # how often the opponent bets or calls
OVER = ("pp", "bp", "bb", "pbp", "pbb")


def chips(moves: str, higher: bool) -> float:
    """The chips that the first player wins, who has the higher card or not."""
    return {"bp": 1.0, "pbp": -1.0}.get(moves, (1.0 + ("b" in moves)) * (1 if higher else -1))


class Kuhn:  # a state is (seed, own card, the opponent's, moves so far, own seat)
    def reset(self, row, seed):
        draw = random.Random(seed)
        own, other = draw.sample("JQK", 2)
        seat = draw.randrange(2)
        moves = self.move(seed, other, "") if seat else ""
        return Begin((seed, own, other, moves, seat), [{"role": "user", "content": f"{own}:{moves}"}])

    def step(self, state, reply):
        seed, own, other, moves, seat = state
        if reply.text not in ("p", "b"):
            return Step(state, reward=-2.0, done=True, info={"wrong": 1.0})
        moves, said = moves + reply.text, ""
        if moves not in OVER:
            said = self.move(seed, other, moves)
            moves += said
        if moves not in OVER:
            return Step((seed, own, other, moves, seat), [{"role": "user", "content": said}])
        won = chips(moves, higher=("JQK".index(own) > "JQK".index(other)) != bool(seat))
        return Step(state, reward=-won if seat else won, done=True, info={"wrong": 0.0})

    def move(self, seed: int, card: str, moves: str) -> str:
        return "b" if random.Random(f"{seed} {moves}").random() < BETS[card] else "p"


def main(output_dir: Path = Path("runs/kuhn"), seed: int = 0, more: tuple[str, ...] = ()) -> int:
    tokenizer = quickstart.character_tokenizer("JQK:pb")
    model = quickstart.small_model(len(tokenizer), width=64)
    models.save(model, models.init_params(model, Key(seed)), output_dir / "start", tokenizer=tokenizer)
    given = [f"--output-dir={output_dir}", f"--model.path={output_dir / 'start'}", f"--seed={seed}"]
    return fppo(["train", str(Path(__file__).with_suffix(".toml")), *given, *(f"--{each}" for each in more)])


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
