"""The values of games are those of every sequence of tokens and every deal, one by one."""

import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import advantages, data, metrics, models
from fppo.assembly.checks import EVALUATE
from fppo.assembly.engines import game_of
from fppo.assembly.inputs import Inputs
from fppo.assembly.run import assemble
from fppo.batch import Column
from fppo.data import stop_texts
from fppo.key import Key
from fppo.pipeline.games import Played, Ways
from fppo.quickstart import character_tokenizer, small_model
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import EPISODE, Chance, End, Game, Turn
from fppo.rollout.turns.observations import PlainText
from fppo.runs.samples import truth_lines
from fppo.settings.files import SettingsError
from fppo.steps.forward import TokenOutputs
from tests import tiny_run

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from credit import games

END = 1


def say_or_stop(state):
    """A coin is hidden and another one shown; "ab" and "a" are two things to say, of the same first letter."""
    if state == "x":
        return Chance([(0.25, ("heads", 0)), (0.75, ("tails", 0))])
    coin, turn = state[:2]
    if turn == 0:
        return Turn("", {"ab": (coin, 1), "a": (coin, 2), "b": (coin, 3)})
    if turn == 1:
        seen = 0.9 if coin == "heads" else 0.2
        return Chance([(seen, (coin, 4, "c")), (1 - seen, (coin, 4, "cc"))])
    if turn == 4:
        return Turn(state[2], {"b": (coin, 5), "aa": (coin, 6)})
    return End({2: 0.5, 3: 0.1, 5: float(coin == "heads"), 6: 0.75 * (coin == "tails")}[turn])


@pytest.mark.parametrize(
    ("u", "state"), [(0.0, "a"), (0.2, "a"), (0.25, "b"), (0.74, "b"), (0.75, "d"), (1 - 1e-16, "d")]
)
def test_what_is_dealt_is_the_outcome_whose_share_a_number_lies_in(u, state):
    assert Chance([(0.0, "never"), (0.25, "a"), (0.5, "b"), (0.0, "nor this"), (0.25, "d")]).at(u) == state


class Policy:
    """Log-probs of the next token in float64, drawn for every prefix."""

    def __init__(self, words):
        self.words = words

    def __call__(self, prefix):
        rows = torch.tensor([sum((t + 2) * 97**i for i, t in enumerate(prefix)) % 2**40])
        return (3 * Key(5).uniform(rows, self.words)[0]).log_softmax(0)

    def outputs(self, rows):
        """As a pass gives them, of rows of one prompt or several."""
        width = rows.response_mask.shape[1]
        found = torch.zeros(rows.response_mask.shape, dtype=torch.float64)
        for i, (tokens, seen) in enumerate(zip(rows.tokens, rows.attention_mask, strict=True)):
            for t in range(width):
                at = len(tokens) - width + t
                found[i, t] = self(tokens[:at][seen[:at]].tolist())[tokens[at]]
        return TokenOutputs(log_probs=found)


def played(game, tokenizer, sampling, **changes):
    most = {"max_turns": 4, "turn_tokens": 3, **changes}
    unused = SimpleNamespace()
    engine = TurnsEngine(
        engine=unused, tools=unused, encode=PlainText(tokenizer), tokenizer=tokenizer, pad_token_id=0, **most
    )
    return Played(game=game, engine=engine, sampling=sampling)


def deals(game):
    """What can be drawn, as draws with their probabilities: by the middles of what falls to each outcome."""

    def middles(state):
        node = game.node(state)
        if isinstance(node, Chance):
            low = 0.0
            for p, after in node.outcomes:
                yield p, low + p / 2, after
                low += p

    return middles


def every_response(game, opening, tokenizer, policy, sampling, turn_tokens, gamma):
    """All that can be said and dealt: tokens, which of them are the policy's, how probable that is, and the score.

    Turns end as the engine ends them, and what is dealt is drawn by the game itself, in its tool and in its reward.
    """
    deal = deals(game)

    def dealt(state, p, drawn):
        """The draws that lead from here to turns or ends: their probability, draws, and state."""
        node = game.node(state)
        if not isinstance(node, Chance):
            yield p, drawn, state
            return
        for q, u, after in deal(state):
            yield from dealt(after, p * q, [*drawn, u])

    def turns(tokens, chosen, p, states, conversation, said):
        for log_p, ids in one_turn(prompt + tokens, sampling.max_tokens - len(tokens)):
            text = tokenizer.decode(ids[:-1] if ids[-1] == END else ids)
            finish = "stop" if sampling.stopped(ids) else "length"
            for q, drawn, state in states:
                after = (tokens + ids, chosen + [True] * len(ids), p * q * math.exp(log_p))
                node = game.node(state)
                allowed = isinstance(node, Turn) and text in node.actions
                futures = dealt(node.actions[text], 1.0, drawn) if allowed else [(1.0, drawn, state)]
                for more, draws, then in futures:
                    full = [*draws, *[0.5] * (game.draws - len(draws))]
                    opened = [{"role": "user", "content": opening, "draws": full}]
                    answer = {"role": "assistant", "content": text}
                    shown = game([*opened, *conversation, answer]) if finish == "stop" else None
                    if shown is None:
                        score = game.score(
                            SimpleNamespace(
                                extras={EPISODE: {"opening": opening, "draws": full, "turns": [*said, text]}},
                                finish=finish,
                            )
                        )
                        yield *after[:2], after[2] * more, score
                    else:
                        told = tokenizer.encode(shown[0]["content"])
                        yield from turns(
                            after[0] + told,
                            after[1] + [False] * len(told),
                            after[2] * more,
                            [(1.0, draws, then)],
                            [*conversation, answer, *shown],
                            [*said, text],
                        )

    def one_turn(prefix, room):
        for length in range(1, min(turn_tokens, room) + 1):
            for ids in itertools.product(range(policy.words), repeat=length):
                ids = list(ids)
                if any(sampling.stopped(ids[:i]) for i in range(1, length)):
                    continue
                if sampling.stopped(ids) or length == min(turn_tokens, room):
                    yield sum(policy(prefix + ids[:i])[ids[i]].item() for i in range(length)), ids

    prompt = tokenizer.encode(opening)
    yield from turns([], [], 1.0, list(dealt(opening, 1.0, [])), [], [])


CASES = {
    "hidden": (Game(say_or_stop, draws=2), "x", "abcx", None, {"turn_tokens": 3, "max_turns": 2}),
    "poker": (games.poker(1), "Q?", "JQKbc?", "bc", {"turn_tokens": 1}),
    "two hands": (games.poker(2), "Q?", "JQKbc?", "bc", {"turn_tokens": 1}),
    "ice": (games.ICE, "0021", "012LRUD", "LRUD", {"turn_tokens": 1}),
}


@pytest.mark.parametrize(
    ("name", "gamma"),
    [("hidden", 0.9), ("poker", 1.0), pytest.param("two hands", 0.9, marks=pytest.mark.slow), ("ice", 1.0)],
)
def test_they_are_those_of_all_sequences_and_deals_one_by_one(name, gamma):
    game, opening, characters, stops, limits = CASES[name]
    tokenizer = character_tokenizer(characters)
    policy = Policy(len(tokenizer))
    texts = None if stops is None else stop_texts(tokenizer, stops)
    sampling = Sampling(max_tokens=14, stop_token_ids=(END,), stop_texts=texts)
    whole = attrs.evolve(played(game, tokenizer, sampling, **limits), gamma=gamma)
    every = list(every_response(game, opening, tokenizer, policy, sampling, limits["turn_tokens"], gamma))
    assert math.fsum(p for _, _, p, _ in every) == pytest.approx(1, rel=1e-12)
    total, weight, said = {}, {}, {}
    for tokens, chosen, p, score in every:
        count = sum(chosen)
        for t in (t for t in range(len(tokens)) if chosen[t]):
            left = count - sum(chosen[:t]) - 1
            prefix = tuple(tokens[:t]), tuple(chosen[:t])
            weight[prefix] = weight.get(prefix, 0) + p
            total[prefix] = total.get(prefix, 0) + p * score * gamma**left
            own = prefix, tokens[t]
            w, s = said.get(own, (0, 0))
            said[own] = w + p, s + p * score * gamma**left
    some = every[:: max(1, len(every) // 100)] + [row for row in every if row[3]][:: max(1, len(every) // 100)]
    width = max(len(tokens) for tokens, *_ in some)
    start = tokenizer.encode(opening)
    asked = SimpleNamespace(
        tokens=torch.tensor([start] * len(some)), attention_mask=torch.ones(len(some), len(start)).bool()
    )
    rollout = SimpleNamespace(
        tokens=torch.tensor([start + tokens + [0] * (width - len(tokens)) for tokens, *_ in some]),
        attention_mask=torch.tensor(
            [[True] * (len(start) + len(tokens)) + [False] * (width - len(tokens)) for tokens, *_ in some]
        ),
        response_mask=torch.tensor([chosen + [False] * (width - len(chosen)) for _, chosen, _, _ in some]),
        extras=Column([{EPISODE: {"opening": opening, "draws": [0.5] * 9, "turns": []}}] * len(some)),
        finish=Column(["length"] * len(some)),
    )
    (found,) = whole(asked, rollout, policy.outputs)
    seen = set()
    for row, (tokens, chosen, _, _) in enumerate(some):
        for t in range(len(tokens)):
            prefix = tuple(tokens[:t]), tuple(chosen[:t])
            own = prefix, tokens[t]
            expected = total[prefix] / weight[prefix] if chosen[t] else 0.0
            assert found.values[row, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-13)
            advantage = said[own][1] / said[own][0] - expected if chosen[t] else 0.0
            assert found.advantages[row, t].item() == pytest.approx(advantage, rel=1e-10, abs=1e-13)
            seen.add(round(expected, 6))
    assert len(seen) >= 3  # prefixes of as many values


class Equilibrium(Policy):
    """Kuhn's first player: bluffs with a third of the jacks, and always bets the king."""

    def __call__(self, prefix):
        card, answer = TOKENIZER.decode(prefix)[0], len(prefix) > 2
        bets = {"J": 0.0, "Q": 2 / 3, "K": 1.0}[card] if answer else {"J": 1 / 3, "Q": 0.0, "K": 1.0}[card]
        probs = {"b": bets, "c": 1 - bets}
        return torch.tensor(
            [probs.get(TOKENIZER.decode([i]), 0.0) for i in range(self.words)], dtype=torch.float64
        ).log()


TOKENIZER = character_tokenizer("JQKbc?")


def test_the_value_of_kuhns_poker_is_known():
    stops = Sampling(max_tokens=4, stop_token_ids=(END,), stop_texts=stop_texts(TOKENIZER, "bc"))
    ways = Ways(played(games.poker(1), TOKENIZER, stops))
    for card in games.CARDS:
        ways.add(tuple(TOKENIZER.encode(f"{card}?")), f"{card}?")
    log_probs = Equilibrium(len(TOKENIZER)).outputs(ways.rows(torch.device("cpu"))).log_probs
    values, _ = advantages.game_values(log_probs[ways.row, ways.column].exp(), ways.tree())
    roots = [values[i] for path, i in ways._places.items() if not path.tokens]
    assert sum(roots).item() / 3 == pytest.approx(1 / 2 - 1 / 18 / 4, rel=1e-12)


def twice_seen(state):
    """A coin is hidden, and looked at after each of two turns: heads look like "c" mostly, tails like "x"."""
    if state == "x":
        return Chance([(0.25, ("heads", 0, "")), (0.75, ("tails", 0, ""))])
    coin, looks, shown = state
    if shown is not None:
        return Turn(shown, {"b": (coin, looks, None)})
    if looks == 2:
        return End(float(coin == "heads"))
    seen = 0.9 if coin == "heads" else 0.2
    return Chance([(seen, (coin, looks + 1, "c")), (1 - seen, (coin, looks + 1, "x"))])


def test_each_look_at_what_is_hidden_weighs_the_states_anew():
    """A policy that always says "b" may expect the chance of heads, given what it has seen, by Bayes's rule."""
    tokenizer = character_tokenizer("xbc")
    sampling = Sampling(max_tokens=9, stop_token_ids=(END,), stop_texts=stop_texts(tokenizer, "b"))
    ways = Ways(played(Game(twice_seen, draws=3), tokenizer, sampling))
    ways.add((2,), "x")
    values, said = advantages.game_values(torch.ones(len(ways.row), dtype=torch.float64), ways.tree())
    found = {tokenizer.decode(path.tokens): values[i].item() for path, i in ways._places.items()}
    expected = {"": 0.25}
    expected |= {"bc": 0.6, "bx": 0.25 * 0.1 / (0.25 * 0.1 + 0.75 * 0.8)}
    for first, p in (("bc", expected["bc"]), ("bx", expected["bx"])):
        expected[f"{first}bc"] = p * 0.9 / (p * 0.9 + (1 - p) * 0.2)
        expected[f"{first}bx"] = p * 0.1 / (p * 0.1 + (1 - p) * 0.8)
    assert found == pytest.approx(expected, rel=1e-12)
    assert sorted(said.tolist()) == pytest.approx(sorted(expected.values()), rel=1e-12)


def test_a_text_is_said_as_the_engine_ends_it():
    """A letter that ends responses ends the turns that it is said in, and no turn in front of it."""
    tokenizer = character_tokenizer("xbc")
    letter = tokenizer.convert_tokens_to_ids("c")
    game = Game(lambda state: Turn("", {"b": 0.25, "bc": 1.0}) if state == "x" else End(state))
    ways = Ways(played(game, tokenizer, Sampling(max_tokens=4, stop_token_ids=(END, letter))))
    ways.add((2,), "x")
    tokens = ways.rows(torch.device("cpu")).tokens[ways.row, 1 + torch.tensor(ways.column)]
    b = tokenizer.convert_tokens_to_ids("b")
    assert sorted(zip(tokens.tolist(), ways.tree().ends.tolist(), strict=True)) == [
        (END, 0.25),
        (b, 0.0),
        (letter, 1.0),
    ]
    stops = Sampling(max_tokens=4, stop_token_ids=(END,), stop_texts=stop_texts(tokenizer, "b"))
    with pytest.raises(ValueError, match="'bc' cannot be said"):
        Ways(played(game, tokenizer, stops)).add((2,), "x")


BAD = [
    (lambda state: End(1.0), {}, "must begin with a turn that shows ''"),
    (lambda state: Turn("look", {"b": 0}), {}, "must begin with a turn that shows ''"),
    (lambda state: Turn("", {}), {}, "it allows nothing"),
    (
        lambda state: Turn("" if state == "x" else "c", {"b": 0}),
        {},
        "has a turn 5, which shows 'c': rollout.turns.max",
    ),
    (lambda state: Turn("", {"bcb": 0}), {"turn_tokens": 3}, "'bcb' cannot be said in 3 tokens"),
    (lambda state: Turn("", {"b?": 0}), {}, "'b\\?' cannot be said in 3"),
    (lambda state: Chance([(0.5, 0), (0.4, 1)]), {}, "with a sum of 1"),
    (
        lambda state: Chance([(0.5, 0), (0.5, 1)]) if state == "x" else Turn("", {"bc"[state]: 2}),
        {},
        "must allow the same texts; they do \\[\\['b'\\], \\['c'\\]\\]",
    ),
]


@pytest.mark.parametrize(("node", "changes", "text"), BAD, ids=range(len(BAD)))
def test_games_that_cannot_be_played_are_refused(node, changes, text):
    tokenizer = character_tokenizer("xbc")
    ways = Ways(played(Game(node), tokenizer, Sampling(max_tokens=14, stop_token_ids=(END,)), **changes))
    with pytest.raises(ValueError, match=text):
        ways.add((2,), "x")


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_game_can_be_played_where_all_its_turns_fit_in_a_response(turns):
    """Each says "bb" and its end, and one token is shown before the next."""
    tokenizer = character_tokenizer("xbc")

    def node(said):
        return End(1.0) if said == turns else Turn("c" if said else "", {"bb": said + 1})

    game = Game(lambda state: node(0 if state == "x" else state))
    for most in range(3, 14):
        sampling = Sampling(max_tokens=most, stop_token_ids=(END,))
        ways = Ways(played(game, tokenizer, sampling, max_turns=turns))
        if most >= 4 * turns - 1:
            ways.add((2,), "x")
            assert (len(ways.row), ways.rows(torch.device("cpu")).response_mask.sum()) == (3 * turns, 3 * turns)
            continue
        number = next(n for n in itertools.count(1) if 4 * n - 1 > most)
        with pytest.raises(ValueError, match=f"in turn {number} of the game 'bb' cannot be said in \\d+ tokens"):
            ways.add((2,), "x")


def test_a_response_that_is_cut_scores_nothing():
    episode = {"opening": "K?", "draws": [0.0, 0.0], "turns": ["b"]}  # the jack or the queen folds
    assert [games.KUHN.end(episode, finish) for finish in ("stop", "length")] == [0.5 + 1 / 4, 0.0]
    assert games.KUHN.end({**episode, "turns": ["b", "b"]}, "stop") == 0.0


def test_a_game_that_deals_more_than_it_says_is_refused():
    with pytest.raises(ValueError, match=r"deals more than draws=1 times"):
        Game(partial(games.kuhn, hands=1), draws=1).after("J", ["b"], [0.5])


def run_of(directory, **changes):
    """The settings of a run on poker: whose policy knows the letters and nothing else."""
    model = small_model(len(TOKENIZER), width=16, layers=1)
    models.save(model, models.init_params(model, Key(0)), directory / "start", tokenizer=TOKENIZER)
    for name in ("train", "test"):
        lines = [json.dumps({"prompt": f"{card}?", "answer": ""}) for card in "JQK"]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    given = {
        "rollout__turns__respond": "credit.games:KUHN",
        "rollout__turns__turn_tokens": 1,
        "rollout__stop": ["b", "c"],
        "rollout__max_tokens": 4,
        "reward__functions": ["credit.games:KUHN.score"],
        "eval__exact_values": True,
    }
    return tiny_run.settings(directory, **{**given, **changes})


@pytest.mark.slow
def test_a_run_is_held_against_them_and_they_against_what_it_samples(tmp_path):
    settings = run_of(tmp_path, rollout__temperature=0.7)
    with assemble(settings) as assembly:
        run, beside = assembly.run, []
        found = metrics.report(assembly.evaluate(run, keep_compared=beside.append))
        assert found["critic/true/variance"] > 1e-5
        assert found["critic/true/r2"] == pytest.approx(1 - found["critic/true/mse"] / found["critic/true/variance"])
        engine, sampling = (getattr(assembly.program.rollout, name) for name in ("engine", "sampling"))
        (asked,) = data.batches(Inputs(settings=settings, trains=False).need(*EVALUATE).held_out, 3)
        ask = Ask(asked, attrs.evolve(sampling, n=300), Key(4))
        rollout = engine.generate(run.actor.params, ask)
        scores = [games.KUHN.end(x[EPISODE], finish) for x, finish in zip(rollout.extras, rollout.finish, strict=True)]
        scores = torch.tensor(scores, dtype=torch.float64).view(3, 300)
        assert len({tuple(x[EPISODE]["draws"]) for x in rollout.extras}) == 900
        first = {line["prompt"]: line["exact_values"][0] for line in truth_lines(beside[0], TOKENIZER, 0)}
        for truth, own in zip([first[f"{card}?"] for card in "JQK"], scores, strict=True):
            assert abs(own.mean() - truth) < 4 * own.std() / 300**0.5
        assert scores.mean() > 0.01
        own = beside[0].rollout  # what the run says of rewards is what its reward function gives
        scored, report = assembly.program.score.score(own)
        assert metrics.report(report)["reward/errors"] == 0
        real = [games.KUHN.end(x[EPISODE], finish) for x, finish in zip(own.extras, own.finish, strict=True)]
        assert scored.scores.tolist() == pytest.approx(real)


REFUSED = [
    ({"reward__functions": ["exact_match"]}, "the reward of credit.games:KUHN.score alone"),
    ({"rollout__top_k": 3}, "all tokens"),
    ({"algorithm__advantage": "turn_gae", "algorithm__advantage__gamma": 0.9}, "give algorithm.advantage.gamma = 1.0"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_runs_whose_values_are_not_the_games_are_refused(tmp_path, changes, text):
    with pytest.raises(SettingsError, match=f"eval.exact_values = True: exact values need .*{text}"):
        run_of(tmp_path, **changes)


def test_a_tool_that_is_no_game_has_no_exact_values(tmp_path):
    own = {"rollout__turns__respond": "tests.rollout.functions:adder"}
    settings = run_of(tmp_path, **own, reward__functions=["tests.rollout.functions:adder.score"])
    with pytest.raises(ValueError, match=r"functions:adder' is no rollout\.Game"):
        game_of(settings.rollout.turns)
