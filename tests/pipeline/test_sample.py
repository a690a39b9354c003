"""How a step's batch is made: refilled groups, rows left out of the loss, rollouts from files."""

import time
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, losses, metrics, tree
from fppo import batch as batches
from fppo.assembly.run import assemble
from fppo.batch import Annotated, Column, Prompts, Rollout, Scored, extend
from fppo.data import DataCursor
from fppo.key import Key
from fppo.losses import KLState
from fppo.pipeline import OfRows, draw, stages
from fppo.pipeline.draw import SampleGroups, equal_groups, truncated
from fppo.pipeline.program import RunState, SampleBatch
from fppo.rollout import saved
from fppo.rollout.engine import Sampling
from fppo.settings import files
from fppo.steps.train_state import TrainState
from tests import tiny, tiny_run
from tests.parts import EVERY_ESTIMATOR, WHITENED

PAD = 7


def _draw(size):
    """Prompts whose ids count up from the cursor's position, of lengths 1 to 3."""

    def draw(cursor):
        ids = range(cursor.position, cursor.position + size)
        width = max(1 + i % 3 for i in ids)
        mask = torch.stack([torch.arange(width) >= width - 1 - i % 3 for i in ids])
        prompts = Prompts(
            tokens=torch.where(mask, torch.tensor(list(ids))[:, None] + 10, PAD),
            attention_mask=mask,
            row_ids=torch.arange(size),
            ids=Column(map(str, ids)),
            ground_truth=Column([None] * size),
            source=Column(["test"] * size),
            extras=Column([{} for _ in ids]),
        )
        return prompts, DataCursor(position=cursor.position + size)

    return draw


def _rollout(prompts, params, *, key, version, n):
    """Responses of 1 to 4 tokens, by the key."""
    rows = batches.repeat(prompts, n)
    row_ids = (prompts.row_ids[:, None] * n + torch.arange(n)).flatten()
    lengths = 1 + (key.uniform(row_ids, 1)[:, 0] * 4).long()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    zeros = torch.zeros(mask.shape)
    made = extend(
        Rollout,
        rows,
        tokens=torch.cat([rows.tokens, torch.where(mask, lengths[:, None], PAD)], 1),
        attention_mask=torch.cat([rows.attention_mask, mask], 1),
        response_mask=mask,
        rollout_log_probs=zeros,
        sampling_log_probs=zeros,
        row_ids=row_ids,
        groups=rows.row_ids,
        versions=torch.full_like(row_ids, version),
        finish=Column("length" if length == 4 else "stop" for length in lengths.tolist()),
    )
    return made, {}


def _score(rollout, *, params, prompts, table):
    """Each row's score from the table, by its prompt's id and its place in the group."""
    places = rollout.row_ids % len(next(iter(table.values())))
    scores = torch.tensor([float(table[i][p]) for i, p in zip(rollout.ids, places.tolist(), strict=True)])
    return extend(Scored, rollout, scores=scores, named_scores={"half": (scores >= 1).float()}), {}


def _run(version=0, *, step=0, **changes):
    """A state before step `step`, of a policy that has had `version` updates and has no parameters."""
    return RunState(actor=TrainState(params={}, opt=None, step=version), key=Key(0), step=step, **changes)


def _sampled(table, *, size, n, max_draws, by="score"):
    return SampleGroups(pad_token_id=PAD, max_draws=max_draws, by=by)(
        _run(3), draw=_draw(size), rollout=partial(_rollout, n=n), score=partial(_score, table=table)
    )


@given(st.data(), st.integers(1, 4), st.integers(2, 3), st.integers(1, 4))
def test_groups_are_the_first_that_differ_and_what_is_missing_is_dropped(data, size, n, max_draws):
    scores = st.lists(st.integers(0, 2), min_size=n, max_size=n)
    table = {str(i): data.draw(scores) for i in range(size * max_draws)}
    batch, cursor, report = _sampled(table, size=size, n=n, max_draws=max_draws)
    differing = [i for i in table if len(set(table[i])) > 1]
    draws = next((d for d in range(1, max_draws + 1) if sum(int(i) < d * size for i in differing) >= size), max_draws)
    seen = [i for i in table if int(i) < draws * size]
    good = [i for i in differing if i in seen][:size]
    spare = [i for i in seen if i not in differing]
    expected = [i for i in [*good, *spare[: size - len(good)]] for _ in range(n)]
    assert list(batch.ids) == expected
    assert cursor.position == draws * size
    assert equal_groups(batch).tolist() == [i not in differing for i in expected]
    assert batch.scores.tolist() == [float(s) for i in dict.fromkeys(expected) for s in table[i]]
    assert len(set(batch.row_ids.tolist())) == size * n
    assert batch.groups.tolist() == [g for g in batch.groups[::n].tolist() for _ in range(n)]
    assert len(set(batch.groups.tolist())) == size
    assert float(report["rollout/groups/draws"].value) == draws
    kept, drawn = (float(x) for x in report["rollout/groups/kept"])
    assert (kept, drawn) == (len([i for i in differing if i in seen]), draws * size)
    assert [float(x) for x in report["rollout/groups/filled"]] == [size - len(good), size]


@pytest.mark.parametrize("episodes", [False, True])
def test_every_draw_has_a_key_rows_and_learning_of_its_own(episodes):
    """The first the key of a plain batch; metrics of what is learned of the prompts add up over the draws."""
    table, asked, learned = {str(i): [0, i >= 6] for i in range(8)}, [], []

    def rollout(prompts, params, *, key, version):
        asked.append((key, version, prompts.row_ids.tolist()))
        made, report = _rollout(prompts, params, key=key, version=version, n=2)
        if episodes:  # whose rows are numbered from 0 on
            count = len(made.row_ids)
            more = {"episodes": made.row_ids, "observed": Column([[]] * count), "row_ids": torch.arange(count)}
            made = attrs.evolve(made, **more)
        return made, report

    def score(rows, *, params, prompts):
        scores = torch.tensor([float(table[i][p % 2]) for p, i in enumerate(rows.ids)])
        return extend(Scored, rows, scores=scores, named_scores={}), {}

    def learn(cursor, scored):
        learned.append((cursor.position, scored.row_ids.tolist()))
        return attrs.evolve(cursor, epoch=cursor.epoch + 1), {"own/learned": metrics.total(1.0)}

    stage = SampleGroups(pad_token_id=PAD, max_draws=9, learn=learn)
    batch, cursor, report = stage(_run(3, step=5), draw=_draw_on(2), rollout=rollout, score=score)
    step = Key(0).fold("step", 5)
    assert [key for key, _, _ in asked] == [step.fold("rollout"), *(step.fold("refill", i) for i in (1, 2, 3))]
    assert [version for _, version, _ in asked] == [3] * 4
    assert [ids for _, _, ids in asked] == [[2 * i, 2 * i + 1] for i in range(4)]
    assert [position for position, _ in learned] == [2, 4, 6, 8]
    rows = [row for _, rows in learned for row in rows]
    assert len(set(rows)) == len(rows) == 16
    assert (cursor.epoch, cursor.position) == (4, 8)
    assert metrics.report(report)["own/learned"] == 4.0
    assert list(batch.ids) == ["6", "6", "7", "7"]


def _draw_on(size):
    """A draw like `_draw`, from a cursor that keeps what else it knows."""
    draw = _draw(size)
    return lambda cursor: (draw(cursor)[0], attrs.evolve(cursor, position=cursor.position + size))


def test_the_responses_that_the_limit_cut_are_those_that_finished_by_length():
    rows = tiny.experience(0, 3)
    assert truncated(attrs.evolve(rows, finish=Column(["stop", "length", "stop"]))).tolist() == [False, True, False]


@given(st.integers(1, 3), st.integers(1, 5))
def test_rows_of_several_draws_keep_their_tokens(size, max_draws):
    table = {str(i): [0, i % 3] for i in range(size * max_draws)}
    batch, _, _ = _sampled(table, size=size, n=2, max_draws=max_draws)
    width = batch.response_mask.shape[1]
    for row in range(len(batch.tokens)):
        number = int(batch.ids[row])
        prompt = batch.tokens[row, :-width][batch.attention_mask[row, :-width]].tolist()
        response = batch.tokens[row, -width:][batch.attention_mask[row, -width:]]
        assert prompt == [number + 10] * (1 + number % 3)
        assert response.tolist() == [len(response)] * len(response)
        assert int(batch.response_mask[row].sum()) == len(response)
        assert (batch.tokens[row][~batch.attention_mask[row]] == PAD).all()


def test_seconds_and_counts_of_several_draws_add_up():
    """Their mean would say a third of what the step took."""
    slow = partial(_rollout, n=2)

    def rollout(*args, **kwargs):
        time.sleep(0.02)
        return slow(*args, **kwargs)

    def score(rollout, **others):
        scored, _ = _score(rollout, table={str(i): [0, 0] for i in range(6)}, **others)
        return scored, {"reward/errors": metrics.total(2)}

    _, _, report = SampleGroups(pad_token_id=PAD, max_draws=3)(_run(), draw=_draw(2), rollout=rollout, score=score)
    assert metrics.report(report)["timing_s/gen"] >= 3 * 0.02
    assert metrics.report(report)["reward/errors"] == 6


def test_a_reward_that_failed_on_a_whole_draw_has_no_number_by_every_name():
    """It has named none of its further numbers then; the next draw has them."""
    table = {"0": [0, 0], "1": [0, 0], "2": [1, 2], "3": [1, 1]}

    def score(rollout, **others):
        scored, report = _score(rollout, table=table, **others)
        named = {} if rollout.ids[0] == "0" else {"format": scored.scores + 4}
        return attrs.evolve(scored, named_scores={**scored.named_scores, **named}), report

    rollout = partial(_rollout, n=2)
    batch, _, _ = SampleGroups(pad_token_id=PAD, max_draws=2)(_run(), draw=_draw(2), rollout=rollout, score=score)
    assert list(batch.ids) == ["2", "2", "0", "0"]
    assert {name: x.tolist() for name, x in batch.named_scores.items()} == {
        "half": [1.0, 1.0, 0.0, 0.0],
        "format": [5.0, 6.0, *[pytest.approx(torch.nan, nan_ok=True)] * 2],
    }


def test_one_draw_of_differing_groups_is_the_plain_batch():
    table = {str(i): [0, 1] for i in range(4)}
    filtered, cursor, _ = _sampled(table, size=4, n=2, max_draws=3)
    stages_of = {"rollout": partial(_rollout, n=2), "score": partial(_score, table=table)}
    plain, after, _ = SampleBatch()(_run(3), draw=_draw(4), **stages_of)
    tiny.assert_same_columns(filtered, plain)
    assert cursor.position == after.position


def test_groups_are_compared_by_a_part_of_the_reward():
    table = {"0": [1, 2], "1": [0, 2], "2": [0, 0], "3": [2, 0]}  # "half" says 1 from a score of 1 on
    batch, _, _ = _sampled(table, size=2, n=2, max_draws=2, by="half")
    assert list(batch.ids) == ["1", "1", "3", "3"]
    with pytest.raises(ValueError, match=r"no part 'hlaf'.*'score', 'half'"):
        equal_groups(batch, by="hlaf")


def _annotated(scores, finish):
    count = len(scores)
    mask = torch.ones(count, 2, dtype=torch.bool)
    numbers = torch.linspace(-2, -1, 2 * count).reshape(count, 2)
    prompts, _ = _draw(count)(DataCursor())
    rollout, _ = _rollout(prompts, {}, key=Key(0), version=0, n=1)
    return extend(
        Annotated,
        rollout,
        tokens=torch.cat([prompts.tokens, torch.ones(count, 2, dtype=torch.int64)], 1),
        attention_mask=torch.cat([prompts.attention_mask, mask], 1),
        response_mask=mask,
        rollout_log_probs=numbers,
        sampling_log_probs=numbers,
        old_log_probs=numbers,
        groups=torch.arange(count) // 2,
        finish=Column(finish),
        scores=torch.tensor(scores),
        named_scores={},
    )


def test_dropped_rows_leave_every_denominator():
    rows = _annotated([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], ["stop", "stop", "stop", "stop", "length", "stop"])
    run = stages.Estimate(advantage_fn=advantages.grpo, max_tokens=2)
    kept = [True, True, False, False, False, True]
    experience, _, report = attrs.evolve(run, drop=[equal_groups, truncated])(rows, KLState(coef=0.0))
    assert experience.response_mask.all(1).tolist() == experience.response_mask.any(1).tolist() == kept
    every, _, _ = run(rows, KLState(coef=0.0))
    mask = torch.tensor(kept)
    torch.testing.assert_close(experience.advantages[mask], every.advantages[mask])
    assert not experience.advantages[~mask].any()
    totals = losses.count_totals(experience.response_mask)
    assert (int(totals.tokens), int(totals.sequences)) == (6, 3)
    dropped = report["rollout/dropped"]
    assert float(dropped.total / dropped.count) == 0.5
    off = attrs.evolve(rows, old_log_probs=rows.old_log_probs + torch.tensor([[0.0, 0.2], *[[0.0, 0.0]] * 5]))
    reject = partial(losses.rollout_correction, reject="token_k1", reject_threshold=1.1)
    experience, _, report = attrs.evolve(run, drop=[equal_groups, truncated], correct=reject)(off, KLState(coef=0.0))
    assert experience.response_mask.tolist() == [[True, False], *[[each, each] for each in kept[1:]]]
    assert experience.correction_weights is not None
    assert torch.equal(experience.correction_weights != 0, experience.response_mask)
    rejected = report["rollout_corr/rollout_rs_masked_fraction"]
    assert float(rejected.total / rejected.count) == pytest.approx(1 / 6)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory


def _estimated(task, rows, **changes):
    """What a run's own program makes of the rows."""
    with assemble(tiny_run.settings(task, rollout__n=2, **changes)) as assembly:
        experience, _, _ = assembly.program.estimate(rows, KLState(coef=0.0))
    return experience


@pytest.mark.parametrize("name", [*WHITENED, "grpo"])
def test_what_whitens_does_so_over_what_is_trained_on(task, name):
    """Rows that are left out of the loss have no say in its scale: not those that fill up, not those that are cut."""
    rows = _annotated([1.0, 0.0, 3.0, 3.0, 0.0, 5.0], ["stop", "stop", "stop", "stop", "length", "stop"])
    rows = attrs.evolve(rows, named_scores={"exact_match": rows.scores})
    filters = {"rollout__filter__groups": True, "rollout__filter__truncated": True}
    found = _estimated(task, rows, algorithm__advantage=name, **filters, **(tiny_run.NO_KL if name == "gdpo" else {}))
    kept = found.advantages[found.response_mask].double()
    assert len(kept) == 6
    plain = OfRows(EVERY_ESTIMATOR[name])(rows, found.token_rewards).advantages
    expected = advantages.whiten(plain, found.response_mask) if name in WHITENED else plain
    torch.testing.assert_close(kept, expected[found.response_mask].double())
    if name in WHITENED:
        assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
        assert float(kept.var()) == pytest.approx(1, abs=1e-6)


def test_gdpo_weighs_the_reward_functions_and_nothing_else(task):
    """The further numbers that a function returns are no rewards."""
    rows = _annotated([1.0, 0.0, 1.0, 3.0], ["stop"] * 4)
    parts = {"exact_match": torch.tensor([1.0, 0.0, 0.0, 1.0]), "length": torch.tensor([2.0, 1.0, 5.0, 5.0])}
    rows = attrs.evolve(rows, named_scores={**parts, "length/more": torch.tensor([9.0, 0.0, 1.0, 7.0])})
    reward = {"functions": ["exact_match", "tests.rewards.functions:length"], "weights": [1.0, 3.0]}
    changes = {f"reward__{name}": value for name, value in reward.items()} | tiny_run.NO_KL
    found = _estimated(task, rows, algorithm__advantage="gdpo", **changes)
    weights = {"exact_match": 1.0, "length": 3.0}
    expected = advantages.gdpo(parts, rows.response_mask, rows.groups, weights=weights)
    torch.testing.assert_close(found.advantages, expected.advantages)
    torch.testing.assert_close(found.returns, expected.returns)


@pytest.mark.parametrize("loss", ["gmpo", "ppo_clip"])
def test_a_loss_of_rows_has_one_weight_for_a_row(task, loss):
    """The geometric mean of its tokens', of those that are left."""
    rows = _annotated([1.0, 0.0, 1.0, 3.0], ["stop"] * 4)
    apart = torch.tensor([[0.1, -0.5], [0.0, 0.3], [-0.2, -0.2], [0.4, -3.0]])
    rows = attrs.evolve(rows, old_log_probs=rows.rollout_log_probs + apart)
    correction = {"name": "rollout", "threshold": 1.2, "reject": "token_k1", "reject_threshold": 10.0}
    changes = {f"algorithm__correction__{name}": value for name, value in correction.items()}
    found = _estimated(task, rows, algorithm__advantage="grpo", actor__loss__name=loss, **changes)
    weights = apart.exp().clamp(max=1.2)
    kept = torch.ones(4, 2, dtype=torch.bool)
    kept[3, 1] = False
    assert torch.equal(found.response_mask, kept)
    if loss == "gmpo":
        means = torch.stack(
            [weights[0].prod().sqrt(), weights[1].prod().sqrt(), weights[2].prod().sqrt(), weights[3, 0]]
        )
        weights = means[:, None].expand(4, 2)
    torch.testing.assert_close(found.correction_weights, weights.where(kept, 0.0), rtol=1e-5, atol=1e-6)


def test_saved_rollouts_come_back_for_their_steps(tmp_path):
    table = {str(i): [0, i % 2] for i in range(8)}
    shared = {"draw": _draw(4), "rollout": partial(_rollout, n=2), "score": partial(_score, table=table)}
    writing = draw.Saving(stage=SampleBatch(), directory=tmp_path)
    here, meta = torch.device("cpu"), torch.device("meta")  # where no parameter is
    made, cursor = [], DataCursor()
    for step in range(2):
        scored, cursor, _ = writing(_run(3, step=step, cursor=cursor), **shared)
        made.append(scored)
    assert saved.steps(tmp_path) == [1, 2]
    saved.check(tmp_path, until=2, rows=8)
    for step in (1, 0):
        run = _run(step=step, cursor=DataCursor(epoch=9))
        run = attrs.evolve(run, actor=attrs.evolve(run.actor, params={"x": torch.zeros(1)}))
        asked = shared | {"score": lambda rollout, **_: (rollout, {})}
        away, _, _ = draw.SampleSaved(directory=tmp_path, vocabulary=18, device=meta)(run, **asked)
        assert {x.device for x in tree.tensors(away)} == {meta}
        found, after, _ = draw.SampleSaved(directory=tmp_path, vocabulary=18, device=here)(run, **shared)
        tiny.assert_same_columns(found, made[step])
        assert after.epoch == 9
        with pytest.raises(
            ValueError, match=r"holds token 1[37], and the model has a vocabulary of 13: it was made with"
        ):
            draw.SampleSaved(directory=tmp_path, vocabulary=13, device=here)(run, **shared)


def test_a_rollout_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    table = {str(i): [0, 1] for i in range(2)}
    prompts, _ = _draw(2)(DataCursor())
    scored, _ = _score(_rollout(prompts, {}, key=Key(0), version=0, n=2)[0], params={}, prompts=prompts, table=table)
    saved.write(scored, tmp_path, 1)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        saved.write(scored, tmp_path, 1)
    found = saved.read(tmp_path, 1, torch.device("cpu"), vocabulary=20)
    tiny.assert_same_columns(found, batches.narrow(Rollout, scored))
    assert saved.steps(tmp_path) == [1]


def test_rows_of_one_episode_count_once_among_saved_rows(tmp_path):
    table = {str(i): [0, 1] for i in range(2)}
    prompts, _ = _draw(2)(DataCursor())
    scored, _ = _score(_rollout(prompts, {}, key=Key(0), version=0, n=2)[0], params={}, prompts=prompts, table=table)
    saved.write(attrs.evolve(scored, episodes=torch.tensor([4, 4, 4, 7])), tmp_path, 1)
    saved.check(tmp_path, until=1, rows=2)
    with pytest.raises(ValueError, match=r"holds 2 rows; give rollout.batch_size = 2"):
        saved.check(tmp_path, until=1, rows=4)


def test_what_is_wrong_with_saved_rollouts_is_said_before_any_work(tmp_path):
    table = {str(i): [0, 1] for i in range(4)}
    made = partial(_rollout, n=2)
    shared = {"draw": _draw(4), "rollout": made, "score": partial(_score, table=table)}
    for step in (0, 2):
        draw.Saving(stage=SampleBatch(), directory=tmp_path)(_run(step=step), **shared)
    with pytest.raises(ValueError, match=r"holds rollouts of steps 1 to 3, but none of step 2; give at most 1 steps"):
        saved.check(tmp_path, until=3, rows=8)
    with pytest.raises(ValueError, match=r"holds 8 rows; give rollout.batch_size = 8"):
        saved.check(tmp_path, until=1, rows=16)
    with pytest.raises(ValueError, match="there is no such directory"):
        saved.check(tmp_path / "none", until=1, rows=8)
    with pytest.raises(ValueError, match=r'"rollout": .*step_00000001.* does not tell which experts the engine chose'):
        saved.check(tmp_path, until=1, rows=8, routed=True)
    top = int(saved.read(tmp_path, 1, torch.device("cpu"), vocabulary=100).tokens.max())
    with pytest.raises(ValueError, match=f"holds token {top}, and the model has a vocabulary of {top}"):
        saved.read(tmp_path, 1, torch.device("cpu"), vocabulary=top)
    with pytest.raises(ValueError, match="there is no such file; the directory holds steps 1 to 3"):
        saved.read(tmp_path, 2, torch.device("cpu"), vocabulary=top + 1)
    path = saved.path_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a whole file"):
        saved.check(tmp_path, until=1, rows=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__filter__groups": True}, "rollout.filter.groups = True: rollout.n = 1"),
        ({"rollout__filter__by": "x"}, "rollout.filter.by = 'x': nothing reads it"),
        ({"rollout__filter__max_draws": 3}, "rollout.filter.max_draws = 3: nothing reads it"),
        ({"rollout__from": "x", "rollout__ahead": 1}, "rollout.ahead = 1: rollout.from is given"),
        ({"rollout__from": "x", "rollout__save": True}, "rollout.save = True: rollout.from is given"),
        (
            {"rollout__interrupt": 8},
            "rollout.interrupt = 8: rollout.ahead = 0: nothing is sampled while weights change",
        ),
        (
            {"rollout__interrupt": 8, "rollout__ahead": 1, "algorithm__advantage": "remax", "rollout__n": 2},
            "rollout.interrupt = 8: remax compares with a greedy response",
        ),
        (
            {"rollout__interrupt": 8, "rollout__ahead": 1, "algorithm__router_replay": "rollout"},
            'rollout.interrupt = 8: algorithm.router_replay = "rollout": each piece',
        ),
        (
            {"rollout__interrupt": 8, "rollout__ahead": 1, "rollout__turns__respond": "calculator"},
            "rollout.interrupt = 8: rollout.turns.respond: turns are not interrupted yet",
        ),
        ({"rollout__ahead": -1}, "rollout.ahead = -1: must be 0 or more"),
        ({"rollout__engine": "vllm", "rollout__cache_gb": 1.5}, "rollout.cache_gb = 1.5: nothing reads it"),
        (
            {"algorithm__old_log_probs": "engine", "algorithm__correction": "rollout"},
            "algorithm.old_log_probs = 'engine': algorithm.correction would compare",
        ),
        ({"algorithm__old_log_probs": "update"}, "algorithm.old_log_probs = 'update': they are needed before"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, changes, words):
    with pytest.raises(files.SettingsError, match=words.replace(".", r"\.")):
        tiny_run.settings(tmp_path, **changes)


def test_a_record_is_its_columns():
    rows = _annotated([1.0, 0.0], ["stop", "length"])
    rows = attrs.evolve(rows, named_scores={"a": rows.scores, "b": -rows.scores})
    again = batches.record(Annotated, batches.columns(rows))
    tiny.assert_same_columns(rows, again)
    assert list(again.named_scores) == ["a", "b"]
    with pytest.raises(ValueError, match="unknown fields"):
        batches.record(Annotated, {**batches.columns(rows), "colour": rows.scores})


def test_the_mass_that_sampling_keeps_is_the_policys_probability_over_that_of_the_draw():
    rows = batches.narrow(Rollout, tiny.experience(0, 2))
    column = torch.full_like(rows.rollout_log_probs, 0.2)
    rows = attrs.evolve(rows, rollout_log_probs=column.log(), sampling_log_probs=(column * 2.5).log())
    stage = stages.RollOut(engine=SimpleNamespace(generate=lambda params, ask: rows), sampling=Sampling())
    _, report = stage(batches.narrow(Prompts, rows), {}, key=Key(0), version=0)
    assert metrics.report(report)["rollout/kept_mass"] == pytest.approx(0.4)
