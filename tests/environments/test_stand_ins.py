"""Adapters of other packages, step by step, where objects of ours stand in for the packages' own."""

from __future__ import annotations

import asyncio
import pickle
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import dill
import pytest

from fppo.environments import Reply
from fppo.environments.adapters.objects import Gym, Kept, seed_generators
from fppo.environments.adapters.tool_classes import ToolClass
from tests.modules import imported_anew

GOLDEN = 0x9E3779B97F4A7C15


def adapter(monkeypatch, name, **modules):
    """An adapter's module, imported beside stand-ins for what it imports, by their names with __ for dots."""
    for path, fields in modules.items():
        made = ModuleType(path.replace("__", "."))
        vars(made).update(fields)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return imported_anew(monkeypatch, f"fppo.environments.adapters.{name}")


def drawn(seed, turn):
    """The first number that the generator draws in a call."""
    return random.Random((seed + GOLDEN * turn) % (1 << 63)).random()


def reply(text, end="."):
    return Reply(text, (1,), end)


class Talk:
    """A game in which players speak in turn until somebody says "end"; each sees what was said since it spoke."""

    def __init__(self, name):
        self.name, self.moves, self.over = name, [], False

    def reset(self, num_players, seed):
        self.players, self.seed = num_players, seed
        self.seen = [[(-1, f"you are {i}", 0)] for i in range(num_players)]

    def get_observation(self):
        player = len(self.moves) % self.players
        seen, self.seen[player] = self.seen[player], []
        return player, seen

    def step(self, text):
        player = len(self.moves) % self.players
        self.moves.append((player, text))
        for each in self.seen:
            each.append((player, f"{player}: {text}", 1))
        return "end" in text, {}

    def close(self):
        return {i: i + len(self.moves) / 10 for i in range(self.players)}, {
            i: {"invalid_move": i == 1} if i else {} for i in range(self.players)
        }


@pytest.mark.parametrize(("players", "seed"), [(2, 6), (2, 2**40 + 7), (3, 8), (1, 5)])
def test_a_game_of_several_players_goes_on_until_it_is_the_policys_turn(monkeypatch, players, seed):
    module = adapter(monkeypatch, "arena", textarena={"make": Talk})
    heard, me = [], seed % players

    def opponent(text, generator):
        heard.append(text)
        return f"{generator.random():.6f}" + (" end" if "stop" in text else "")

    with pytest.raises(ValueError, match="Talk with 2 players: give opponent"):
        module.TextArena(game="Talk")
    environment = module.TextArena(game="Talk", players=players, opponent=opponent if players > 1 else None)
    begun = environment.reset({}, seed)
    state = pickle.loads(pickle.dumps(begun.state))
    game = state.environment
    assert (state.seed, state.turn, game.name, game.players, game.seed) == (seed, 0, "Talk", players, seed % 2**31)
    generator = random.Random(seed % (1 << 63))
    before = [f"{player}: {generator.random():.6f}" for player in range(me)]
    assert begun.messages == [{"role": "user", "content": "\n".join([f"you are {me}", *before])}]
    step = environment.step(state, reply("go on"))
    assert (step.state.seed, step.state.turn, step.done, step.reward) == (seed, 1, False, 0.0)
    generator = random.Random((seed + GOLDEN) % (1 << 63))
    others = [(me + 1 + i) % players for i in range(players - 1)]
    said = [f"{me}: go on", *(f"{player}: {generator.random():.6f}" for player in others)]
    assert step.messages == [{"role": "user", "content": "\n".join(said)}]
    last = environment.step(pickle.loads(pickle.dumps(step.state)), reply("stop" if players > 1 else "end"))
    moves = me + players + 1 + (1 if players > 1 else 0)
    assert (last.done, last.messages, last.state.turn) == (True, (), 2)
    assert last.reward == pytest.approx(me + moves / 10)
    assert last.info == {"invalid": float(me == 1)}
    assert len(heard) == moves - 2


class Spoken(Talk):
    """The same, where observations are texts, as in TextArena's wrappers."""

    def get_observation(self):
        player, seen = super().get_observation()
        return player, "\n".join(text for _, text, _ in seen)


class Wrapper:
    """A wrapper that does not pickle: what it lacks it asks of the game inside."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)


class History(Wrapper):
    def get_observation(self):
        return self.env.get_observation()[0], "all that was said"


class Brackets(Wrapper):
    def action(self, action):
        return f"[{action}]"

    def step(self, action):
        return self.env.step(self.action(action))


def test_a_game_is_played_inside_its_wrappers_with_its_moves_as_they_write_them(monkeypatch):
    textarena = {"make": lambda name: Brackets(History(Talk(name))), "Wrapper": Wrapper}
    module = adapter(monkeypatch, "arena", textarena=textarena)
    environment = module.TextArena(game="Talk", opponent=lambda text, generator: "so")
    state = pickle.loads(pickle.dumps(environment.reset({}, 6).state))
    step = environment.step(state, reply("go on"))
    assert step.messages == [{"role": "user", "content": "0: [go on]\n1: [so]"}]
    plain = adapter(monkeypatch, "arena", textarena={"make": Spoken}).TextArena(game="Talk", players=1)
    assert plain.reset({}, 5).messages == [{"role": "user", "content": "you are 0"}]


def test_a_game_that_is_over_before_the_first_move_is_drawn_anew(monkeypatch):
    module = adapter(monkeypatch, "arena", textarena={"make": Talk})
    ends = lambda text, generator: "end" if generator.random() < 0.7 else "so"  # noqa: E731
    environment = module.TextArena(game="Talk", players=3, opponent=ends)
    for seed in range(2, 40, 3):  # the policy is the third player
        begun = environment.reset({}, seed)
        assert begun.messages
        assert pickle.dumps(environment.reset({}, seed)) == pickle.dumps(begun)
        assert environment.step(begun.state, reply("end")).done


class Sums:
    """A data set whose questions are their numbers; half of an answer is worth half."""

    def __init__(self, name, how):
        self.name, self.how = name, how

    def __getitem__(self, number):
        return {"question": f"{self.name} {number}?", "answer": f"{number}"}

    def score_answer(self, answer, entry):
        self.noise = random.random()
        return 1.0 if answer == entry["answer"] else 0.5 if answer == "half" else 0.0


def test_questions_are_drawn_by_the_seed_and_scored_by_their_own_set(monkeypatch):
    made = {}

    def create_dataset(name, **how):
        return made.setdefault(name, Sums(name, how))

    module = adapter(monkeypatch, "reasoning", reasoning_gym={"create_dataset": create_dataset})
    sets = {"b": {"digits": 3}, "a": {"size": 7}}
    environment = module.ReasoningGym(datasets=sets, seed=4)
    assert {name: each.how for name, each in made.items()} == {
        "b": {"seed": 4, "size": 1 << 30, "digits": 3},
        "a": {"seed": 4, "size": 7},
    }
    for seed, row, name in ((6, {}, "a"), (7, {}, "b"), (7, {"dataset": "a"}, "a"), ((1 << 32) + 5, {}, "b")):
        number = seed // 2 % (1 << 30)
        begun = environment.reset(row, seed)
        assert begun == ((name, number, 0), [{"role": "user", "content": f"{name} {number}?"}])
        for text, score in ((f"it is\n {number} ", 1.0), (f"{number}\nhalf", 0.5), ("", 0.0)):
            step = environment.step(begun.state, reply(text))
            assert (step.state, step.messages, step.reward, step.done) == ((name, number, 1), (), score, True)
            right = float(score == 1)
            assert step.info == {f"right/{name}": right, "right_at_once": right, "right": right}
            assert made[name].noise == drawn(number, 0)


def test_further_chances_are_worth_less_and_only_right_answers_count(monkeypatch):
    module = adapter(monkeypatch, "reasoning", reasoning_gym={"create_dataset": lambda name, **how: Sums(name, how)})
    how = {"chances": 3, "worth": 0.25, "again": "once more", "mark": "="}
    environment = module.ReasoningGym(datasets={"a": {}}, **how)
    state = environment.reset({}, 5).state
    for turn, text in enumerate(["x = half", "= 5 = 6"]):
        step = environment.step(state, reply(text))
        assert (step.reward, step.done, step.messages) == (0.0, False, [{"role": "user", "content": "once more"}])
        assert step.info == {"right/a": 0.0, "right_at_once": 0.0, "right": 0.0}
        assert environment._sets["a"].noise == drawn(5, turn)
        state = step.state
    assert state == ("a", 5, 2)
    right, wrong = (environment.step(state, reply(text)) for text in ("6 = 5", "= half"))
    assert (right.reward, right.done, right.info["right"], right.info["right_at_once"]) == (0.0625, True, 1.0, 0.0)
    assert (wrong.reward, wrong.done, wrong.messages) == (0.0, True, ())


class Grids:
    """A data set whose answers have as many lines as its numbers say; none of its own for 0."""

    def __getitem__(self, number):
        return {"question": "?", "answer": "\n".join("12"[:number]) if number else None}

    def score_answer(self, answer, entry):
        return float(answer == (entry["answer"] or "a\n\nb".rpartition("\n\n")[2]))


@pytest.mark.parametrize(
    ("number", "text", "score"),
    [
        (2, "1\n2", 1.0),
        (2, "So it is:\n1\n2\n", 1.0),
        (2, "Now.\n\n1\n2", 1.0),
        (2, "1 2", 0.0),
        (2, "2\n1", 0.0),
        (2, "1\n2\n\nOr 2\n1", 0.0),
        (1, "so\n1", 1.0),
        (1, "1\nso", 0.0),
        (0, "a\n\nb", 1.0),
        (0, "", 0.0),
    ],
)
def test_an_answer_has_as_many_lines_as_the_data_sets_own(monkeypatch, number, text, score):
    module = adapter(monkeypatch, "reasoning", reasoning_gym={"create_dataset": lambda name, **how: Grids()})
    environment = module.ReasoningGym(datasets={"grids": {"size": 3}})
    begun = environment.reset({}, number + 9)  # numbers end with the set
    assert environment.step(begun.state, reply(text)).reward == score
    with pytest.raises(ValueError, match="a row's dataset = 'gridz'; there are grids"):
        environment.reset({"dataset": "gridz"}, 0)


class Sessions:
    """A server's client: sessions that tell what they were sent, and end with the action "end"."""

    made: ClassVar[list[Sessions]] = []

    def __init__(self, base_url):
        self.url, self.log = base_url, []
        Sessions.made.append(self)

    def sync(self):
        self.log.append("sync")
        return self

    def connect(self):
        self.log.append("connect")

    def reset(self, seed):
        self.log.append(seed)
        return SimpleNamespace(observation={"message": f"ready {seed}"})

    def step(self, action):
        self.log.append(action)
        done = action.get("message") == "end"
        seen = {"message": f"{len(self.log)}"} if action.get("message") != "odd" else {"other": 1}
        return SimpleNamespace(observation=seen, done=done, reward=None if done else 0.5)

    def close(self):
        self.log.append("closed")


def test_an_episode_has_a_session_and_is_played_again_where_that_is_not(monkeypatch):
    module = adapter(
        monkeypatch,
        "open_env",
        openenv={},
        openenv__core={},
        openenv__core__generic_client={"GenericEnvClient": Sessions},
    )
    monkeypatch.setattr(Sessions, "made", [])
    environment, other = module.OpenEnv(url="http://x"), module.OpenEnv(url="http://x")
    seed = (1 << 40) + 3
    begun = environment.reset({}, seed)
    (first,) = Sessions.made
    assert (first.url, first.log) == ("http://x", ["sync", "connect", 3])
    assert begun.messages == [{"role": "user", "content": "ready 3"}]
    assert begun.state.session != environment.reset({}, seed).state.session
    one = environment.step(begun.state, reply("a"))
    assert (one.messages, one.reward, one.done) == ([{"role": "user", "content": "4"}], 0.5, False)
    two = environment.step(one.state, reply("odd"))
    assert two.messages == [{"role": "user", "content": "{'other': 1}"}]
    assert two.state == (begun.state.session, seed, ({"message": "a"}, {"message": "odd"}))
    elsewhere = other.step(two.state, reply("b"))
    again = Sessions.made[-1]
    assert again.log == ["sync", "connect", 3, {"message": "a"}, {"message": "odd"}, {"message": "b"}]
    assert elsewhere.messages == [{"role": "user", "content": "6"}]
    assert other.step(elsewhere.state, reply("c")).messages == [{"role": "user", "content": "7"}]
    assert len(again.log) == 7  # its own session goes on
    last = environment.step(two.state, reply("end"))
    assert (last.messages, last.reward, last.done) == ((), 0.0, True)
    assert first.log[-1] == "closed"
    cut = environment.step(environment.reset({}, 9).state, reply("d", end=""))
    assert (cut.done, cut.messages, Sessions.made[-1].log[-1]) == (False, [{"role": "user", "content": "4"}], "closed")
    shaped = module.OpenEnv(url="u", action=lambda text: {"say": text}, shown=lambda seen: seen["message"] * 2)
    step = shaped.step(shaped.reset({}, 1).state, reply("x"))
    assert step.messages == [{"role": "user", "content": "44"}]
    assert Sessions.made[-1].log[-1] == {"say": "x"}


class Losing(Sessions):
    """A client that loses answers, after the server has had the action, and resets."""

    lost: ClassVar[list[str]] = []

    def connect(self):
        super().connect()
        if "connect" in Losing.lost:
            Losing.lost.remove("connect")
            raise ConnectionError("no room")

    def step(self, action):
        seen = super().step(action)
        if action["message"] in Losing.lost:
            Losing.lost.remove(action["message"])
            raise TimeoutError("the answer did not come")
        return seen


def open_env(monkeypatch, client):
    monkeypatch.setattr(Sessions, "made", [])
    fields = {"GenericEnvClient": client}
    return adapter(monkeypatch, "open_env", openenv={}, openenv__core={}, openenv__core__generic_client=fields)


def test_an_action_is_not_played_twice_where_its_answer_was_lost(monkeypatch):
    environment = open_env(monkeypatch, Losing).OpenEnv(url="http://x")
    monkeypatch.setattr(Losing, "lost", ["connect", "b"])
    with pytest.raises(ConnectionError):
        environment.reset({}, 1)
    assert Sessions.made[0].log[-1] == "closed"
    one = environment.step(environment.reset({}, 1).state, reply("a"))
    with pytest.raises(TimeoutError):
        environment.step(one.state, reply("b"))
    assert Sessions.made[1].log[-1] == "closed"
    two = environment.step(one.state, reply("b"))
    assert Sessions.made[2].log == ["sync", "connect", 1, {"message": "a"}, {"message": "b"}]
    environment.step(two.state, reply("c"))
    assert environment.step(one.state, reply("other")).messages == two.messages  # of a state that has been gone on from
    assert Sessions.made[3].log == ["sync", "connect", 1, {"message": "a"}, {"message": "other"}]


def test_so_many_sessions_are_open_at_most(monkeypatch):
    module = open_env(monkeypatch, Sessions)
    environment = module.OpenEnv(url="http://x", sessions=2)
    states = [environment.reset({}, seed).state for seed in range(3)]
    assert [session.log[-1] for session in Sessions.made] == ["closed", 1, 2]
    step = environment.step(states[0], reply("a"))
    assert step.messages == [{"role": "user", "content": "4"}]
    assert [session.log[-1] for session in Sessions.made[:3]] == ["closed", "closed", 2]
    with pytest.raises(ValueError, match="OpenEnv: sessions = 0: give 1 or more"):
        module.OpenEnv(url="http://x", sessions=0)


class Said(dict):
    """A message of the package's."""

    def __init__(self, content):
        super().__init__(role="assistant", content=content)


class Told:
    """A message that is no dict."""

    def __init__(self, role, content):
        self.fields = {"role": role, "content": content, "more": None}

    def model_dump(self):
        return self.fields


class TurnsByTwo:
    """An environment that ends after its second answer, or with "enough" at once, or in its own answer to "last"."""

    def __init__(self, most=2):
        self.most, self.log = most, []
        self.rubric = SimpleNamespace(score_rollout=self.score)

    def get_dataset(self):
        return [{"prompt": f"q{i}"} for i in range(3)]

    async def init_state(self, row, client, model, more):
        await asyncio.sleep(0)
        prompt = [{"role": "user", "content": row["prompt"]}]
        return {"prompt": prompt, "trajectory": [], "trajectory_id": "t", "model": model, "setup": False}

    async def setup_state(self, state):
        state["setup"] = True

    async def is_completed(self, state):
        said = [turn["completion"][0]["content"] for turn in state["trajectory"]]
        return len(said) >= self.most or "enough" in said or state.get("answered", False)

    async def env_response(self, messages, state):
        state["answered"] = messages[-1]["content"] == "last"
        return [Told("user", f"again {len(messages)}")]

    async def render_completion(self, state):
        state["rendered"] = True

    async def score(self, state):
        assert state["rendered"]
        assert state["setup"]
        state["reward"], state["metrics"] = 0.5 + len(state["trajectory"]), {"right": 1.0}
        self.log.append(state)


def test_turns_of_verifiers_are_put_to_its_environment(monkeypatch):
    given = []

    def load_environment(name, **arguments):
        given.append((name, arguments))
        return TurnsByTwo()

    class Client:
        __abstractmethods__ = frozenset({"x"})

    fields = {"Client": Client, "load_environment": load_environment}
    module = adapter(monkeypatch, "verifiers_01", verifiers=fields, verifiers__types={"AssistantMessage": Said})
    environment = module.Verifiers(env="named", arguments={"a": 1})
    assert given == [("named", {"a": 1})]
    for row, seed, number in (({"number": 4}, 0, 1), ({}, 5, 2)):
        assert environment.reset(row, seed).messages == [{"role": "user", "content": f"q{number}"}]
    own = TurnsByTwo()
    environment = module.Verifiers(env=lambda most: own, arguments={"most": 2})
    begun = environment.reset({"number": 1}, 0)
    step = environment.step(begun.state, reply("so"))
    assert (step.messages, step.reward, step.done) == ([{"role": "user", "content": "again 2"}], 0.0, False)
    held = dill.loads(step.state)
    turn = held["trajectory"][0]
    assert turn["prompt"] == [{"role": "user", "content": "q1"}]
    assert (turn["completion"], turn["is_truncated"], turn["trajectory_id"]) == ([Said("so")], False, "t")
    assert [x if isinstance(x, dict) else x.fields for x in held["read"]] == [
        {"role": "user", "content": "q1"},
        Said("so"),
        {"role": "user", "content": "again 2", "more": None},
    ]
    last = environment.step(step.state, reply("more"))
    assert (last.messages, last.reward, last.done, last.info) == ((), 2.5, True, {"right": 1.0})
    assert len(own.log[-1]["trajectory"][1]["prompt"]) == 3  # what was read before
    for text, end in (("enough", "."), ("last", "."), ("so", "")):
        over = environment.step(begun.state, reply(text, end=end))
        assert (over.messages, over.reward, over.done) == ((), 1.5, True)
        assert own.log[-1]["trajectory"][0]["is_truncated"] == (not end)


class Lights:
    """Gym's kind; an action ends it as it says."""

    def __init__(self, row=None):
        self.row = row

    def reset(self, seed=None):
        self.seed = seed
        return f"{self.row} {seed} {random.random():.6f}", {}

    def step(self, action):
        info = {"a": 1, "b": True, "c": 0.5, "d": "text", "e": None}
        return f"{random.random():.6f}", 2, action == "right", action == "late", info


@pytest.mark.parametrize("rows", [True, False])
def test_gyms_objects_are_made_of_rows_and_end_either_way(rows):
    environment = Gym(make=Lights, role="tool", rows=rows)
    seed = (1 << 40) + 5
    begun = environment.reset({"x": 1}, seed)
    shown = f"{ ({'x': 1} if rows else None) } 5 {drawn(seed, 0):.6f}"
    assert begun.messages == [{"role": "tool", "content": shown}]
    state = begun.state
    for turn in (1, 2):
        step = environment.step(state, reply("on"))
        assert step.messages == [{"role": "tool", "content": f"{drawn(seed, turn):.6f}"}]
        assert (step.reward, step.done, step.info) == (2.0, False, {"a": 1.0, "b": 1.0, "c": 0.5})
        state = step.state
        assert (state.seed, state.turn) == (seed, turn)
    for action in ("right", "late"):
        step = environment.step(state, reply(action))
        assert (step.done, step.messages, step.reward) == (True, (), 2.0)


def test_generators_are_seeded_by_the_seed_and_the_turn():
    numpy = pytest.importorskip("numpy")
    for seed, turn in ((3, 0), (3, 2), (1 << 61, 1)):
        seed_generators(seed, turn)
        number = (seed + GOLDEN * turn) % (1 << 63)
        assert random.random() == random.Random(number).random()
        assert numpy.random.random() == numpy.random.RandomState(number % (1 << 32)).random_sample()


class Shop:
    """A class of tools, which draws a price."""

    def reset(self, **row):
        self.row, self.asked = row, 0
        return row.get("text")

    def price(self, of: str = "lamp"):
        self.asked += 1
        return f"{of} {random.random():.6f}"

    def get_reward(self):
        return 1 + self.asked


def test_a_turn_may_hold_several_calls_and_a_cut_one_is_rewarded():
    call = '<tool_call>{{"name": "price"{}}}</tool_call>'
    environment = ToolClass(make=Shop)
    assert environment.reset({}, 4).messages == ()
    begun = environment.reset({"text": "what?", "x": 1}, 4)
    assert begun.messages == [{"role": "user", "content": "what?"}]
    assert begun.state.environment.row == {"text": "what?", "x": 1}
    both = call.format("") + "\n and " + call.format(', "arguments": {"of": "file"}')
    step = environment.step(begun.state, reply(both))
    generator = random.Random((4 + GOLDEN) % (1 << 63))
    assert step.messages == [
        {"role": "tool", "name": "price", "content": f"{of} {generator.random():.6f}"} for of in ("lamp", "file")
    ]
    assert (step.reward, step.done, step.state.seed, step.state.turn) == (0.0, False, 4, 1)
    cut = environment.step(step.state, reply(call.format(""), end=""))
    assert (cut.reward, cut.done, len(cut.messages), cut.state.turn) == (4.0, False, 1, 2)
    last = environment.step(cut.state, reply("so"))
    assert (last.reward, last.done, last.messages) == (4.0, True, [])
    plain = ToolClass(make=lambda: SimpleNamespace(reset=lambda: None), call=r"\[(.*?)\]")
    assert plain.step(Kept(1, 0, SimpleNamespace()), reply("so")).reward == 0.0
    assert plain.step(Kept(1, 0, Shop()), reply('["x"]')).messages[0]["content"].startswith("error: ")
