"""What the engine does when its host dies, is interrupted, or does not come back: a host that does so on demand."""

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from fppo import models
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.requests import QueueFull, Request
from fppo.rollout.sync import SyncError, digest
from fppo.rollout.vllm import probe as vllm_probe
from fppo.rollout.vllm import remote
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from fppo.rollout.vllm.host import Answer, EngineDied, EngineFailure, HostDraws
from fppo.runtime.mesh import LOCAL, Sharding, any_rank
from fppo.runtime.simulate import simulate
from tests.models.families import make
from tests.rollout.test_embedded import make_prompts

SHORT = Sampling(n=2, max_tokens=3)
MODEL, PARAMS = make("qwen2", dtype=torch.float32)


class Stub:
    """A host that answers rows with their numbers. `fates`: methods and what they raise, each once, in this order."""

    limit = 128

    def __init__(self, log, fates):
        self.log, self.fates, self.got, self.here = log, fates, {}, True
        log.append("start")
        self._meet("start")

    def _meet(self, method):
        if not self.here:
            raise EngineDied("it is gone")
        if self.fates and self.fates[0][0] == method:
            error = self.fates.pop(0)[1]
            self.here = not isinstance(error, EngineDied)
            raise error

    def call(self, method, *arguments):
        self._meet("call")
        if method == "update_weights":
            return self.take_in(arguments[0])
        return [({name: [name] for name in PARAMS}, {})]

    def begin_load(self, how, transfer=False):
        self._meet("begin_load")
        self.got, self.how = {}, how

    def take_in(self, tensors):
        self._meet("take_in")
        self.got |= {name: digest(x, self.how) for name, x in tensors.items()}

    def end_load(self):
        self._meet("end_load")
        self.log.append("loaded")
        return dict(self.got), []

    def generate(self, request, on_answer):
        self.log.append(f"asked for {len(request.prompts)}")
        for place, row in enumerate(request.row_ids.tolist()):
            if place == 5:
                self._meet("generate")
            assert self.here
            length = request.limits[place]
            ones = np.full(length, -1, np.float32)
            on_answer(place, Answer(np.full(length, row % 31), ones, ones))

    def begin_turns(self, adapter):
        self.log.append(f"turns by {adapter}")

    def turn(self, new, ended):
        self._meet("turn")
        self.log.append(f"turn of {[row.number for row in new]}, {list(ended)} ended")
        return [HostDraws(row.number, [3], [-1.0], [-2.0], True, 0) for row in new]

    def sleep(self):
        self._meet("sleep")
        self.log.append("slept")

    def wake(self, part):
        self._meet(f"wake {part}")
        self.log.append(f"woke {part}")

    def close(self):
        self.here = False
        self.log.append("closed")


@attrs.define
class Starts:
    """Makes a host at each start; and the log of what became of them all."""

    fates: list = attrs.field(factory=list)
    log: list = attrs.field(factory=list)
    hosts: list = attrs.field(factory=list)

    def __call__(self, model, options, dtype):
        self.hosts.append(Stub(self.log, self.fates))
        return self.hosts[-1]


def started(*fates, starts=None, model=MODEL, mesh=None, send="all", bucket_bytes=1 << 28, transfer=None, **options):
    """An engine on such hosts, the first start of which is a good one, and their log."""
    starts, own = starts or Starts(), VllmOptions(host="process", **options)
    how = {"send": send, "bucket_bytes": bucket_bytes, "transfer": transfer, "start": starts}
    engine = VllmEngine(model, pad_token_id=0, mesh=mesh, probe="never", options=own, **how)
    starts.fates.extend(fates)
    starts.log.clear()
    return engine, starts.log


def generate(engine, version=1, sampling=SHORT, **others):
    return engine.generate(PARAMS, Ask(make_prompts(), sampling, Key(0), version=version, **others))


def check(rollout):
    """Each row has its own number as tokens."""
    mask = rollout.response_mask
    assert mask.shape == (12, 3)
    assert torch.equal(rollout.tokens[:, -3:], (rollout.row_ids % 31)[:, None].where(mask, 0))


DIED = EngineDied("it died")


@pytest.mark.parametrize("method", ["start", "call", "begin_load", "take_in", "end_load"])
def test_a_replacement_that_dies_before_it_answers_is_replaced_too(method):
    engine, log = started(("generate", DIED), (method, DIED), restarts=2)
    with pytest.warns(RuntimeWarning, match="it died; 5 of 12 rows are done, a new one goes on") as warned:
        check(generate(engine))
    assert len(warned) == engine.replaced == 2
    assert len({str(each.message) for each in warned}) == 2  # Python shows a text once only
    assert [line for line in log if line.startswith("asked")] == ["asked for 12", "asked for 7"]
    log.clear()
    check(generate(engine))
    assert log == ["asked for 12"]


def test_rows_that_are_left_keep_their_numbers_and_limits():
    engine, _ = started(("generate", DIED))
    limits = torch.tensor([3, 1, 9, 2, 1, 2])
    reported = {}
    stop = attrs.evolve(SHORT, stop_token_ids=(22, 29))  # of rows that end then anyway
    with pytest.warns(RuntimeWarning, match="5 of 12 rows"):
        rollout = generate(
            engine, sampling=stop, limits=limits, on_finished=lambda row, *rest: reported.update({row: tuple(rest)})
        )
    check(rollout)
    assert [row for row, finish in enumerate(rollout.finish) if finish == "stop"] == [2, 9]
    lengths = limits.clamp(max=3).repeat_interleave(2).tolist()
    assert rollout.response_mask.sum(1).tolist() == lengths
    numbers = rollout.row_ids.tolist()
    tokens = [[numbers[row] % 31] * length for row, length in enumerate(lengths)]
    assert reported == dict(enumerate(zip(tokens, rollout.finish, strict=True)))


def test_a_host_gets_all_that_is_asked():
    starts = Starts()
    engine, _ = started(starts=starts)
    (host,) = starts.hosts
    asked, generated = [], host.generate

    def noted(request, on_answer):
        asked.append(request)
        if request.forced is None:
            generated(request, on_answer)
            return
        for row in reversed(range(len(request.prompts))):
            numbers = np.arange(request.forced.shape[1], dtype=np.float32) + 10 * row
            on_answer(row, Answer(request.forced[row].numpy(), numbers, numbers))

    host.generate = noted
    prompts, limits = make_prompts(), torch.tensor([3, 1, 9, 2, 3, 1])
    sampling = attrs.evolve(SHORT, temperature=0.5, top_k=3)
    generate(engine, sampling=sampling, limits=limits, offset=4)
    own = [ids[mask].tolist() for ids, mask in zip(prompts.tokens, prompts.attention_mask, strict=True)]
    found = engine.log_probs([[3, 4, 5], [6, 7, 8]], 2, temperature=0.7, inputs=["one", None])
    assert found.tolist() == [[0.0], [10.0]]
    whole, forced = asked
    for request, fields in (
        (
            whole,
            {
                "prompts": [ids for ids in own for _ in range(2)],
                "sampling": sampling,
                "key": Key(0),
                "row_ids": (2 * prompts.row_ids[:, None] + torch.arange(2)).flatten().tolist(),
                "forced": None,
                "limits": [3, 3, 1, 1, 3, 3, 2, 2, 3, 3, 1, 1],
                "adapter": None,
                "offset": 4,
                "inputs": None,
            },
        ),
        (
            forced,
            {
                "prompts": [[3, 4], [6, 7]],
                "sampling": Sampling(max_tokens=1, temperature=0.7),
                "key": Key(0),
                "row_ids": [0, 1],
                "forced": [[5], [8]],
                "limits": None,
                "adapter": None,
                "offset": 0,
                "inputs": ["one", None],
            },
        ),
    ):
        shown = {field.name: getattr(request, field.name) for field in attrs.fields(type(request))}
        assert {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in shown.items()} == fields
    part = attrs.evolve(forced, limits=[4, 5]).part([1])
    assert (part.prompts, part.row_ids.tolist(), part.forced.tolist()) == ([[6, 7]], [1], [[8]])
    assert (part.limits, part.inputs, part.sampling) == ([5], [None], forced.sampling)


def test_weights_are_sent_where_the_version_or_any_tensor_is_another():
    engine, log = started()
    for params, version, sent in (
        (PARAMS, 1, True),
        (PARAMS, 1, False),
        (dict(PARAMS), 1, False),
        (PARAMS, 2, True),
        (PARAMS | {"model.norm.weight": PARAMS["model.norm.weight"].clone()}, 2, True),
        (PARAMS, 2, True),
    ):
        log.clear()
        rollout = engine.generate(params, Ask(make_prompts(), SHORT, Key(0), version=version))
        assert rollout.versions.unique().tolist() == [engine.version] == [version]
        assert log == ["loaded"] * sent + ["asked for 12"]


def test_only_weights_that_may_change_are_sent_again_and_buffers_in_their_own_dtype():
    starts, seen = Starts(), {}
    first, second, third = sorted(PARAMS)[:3]
    model, params = attrs.evolve(MODEL, buffers=frozenset([first])), {name: x.clone() for name, x in PARAMS.items()}
    how = {"pad_token_id": 0, "probe": "never", "send": "changed", "frozen": frozenset([second])}
    engine = VllmEngine(model, options=VllmOptions(host="process", dtype="bfloat16"), start=starts, **how)
    (host,) = starts.hosts
    take_in = host.take_in
    host.take_in = lambda tensors: (seen.update(tensors), take_in(tensors))
    assert engine.sync(params, version=1).tensors == len(PARAMS)
    assert {name for name, x in seen.items() if x.dtype == torch.float32} == {first}
    seen.clear()
    for name in (second, third):
        params[name] += 1
    assert engine.sync(params, version=2).tensors == 1
    assert [*seen] == [third]


def test_an_engine_that_may_replace_no_more_starts_anew_when_it_is_asked_again():
    engine, log = started(("generate", DIED), ("start", DIED), restarts=1)
    with pytest.warns(RuntimeWarning), pytest.raises(EngineDied, match="it died") as raised:
        generate(engine)
    assert "restarts = 1: it is not replaced again" in raised.value.__notes__[-1]
    log.clear()
    check(generate(engine))
    assert log == ["closed", "start", "loaded", "asked for 12"]


def test_one_that_does_not_come_back_can_be_asked_again_and_closed():
    engine, log = started(("generate", DIED), ("start", EngineFailure("no room")))
    with engine:
        with pytest.warns(RuntimeWarning), pytest.raises(EngineFailure, match="no room"):
            generate(engine)
        check(generate(engine))
    assert log[-1] == "closed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the caller")])
def test_a_generation_that_was_left_half_way_is_not_gone_on_from(error):
    """The host may be in the middle of it; it is no death to count."""
    engine, log = started(("generate", error), restarts=0)
    with pytest.raises(type(error)):
        generate(engine)
    assert engine.version is None
    log.clear()
    check(generate(engine))
    assert log == ["closed", "start", "loaded", "asked for 12"]
    assert engine.replaced == 0


@pytest.mark.parametrize("method", ["begin_load", "take_in", "end_load", "wake weights", "wake kv_cache"])
def test_a_sync_that_was_left_half_way_starts_anew(method):
    engine, log = started((method, KeyboardInterrupt()), sleep=True, restarts=0)
    engine.sleep()
    with pytest.raises(KeyboardInterrupt):
        engine.sync(PARAMS, version=1)
    assert engine.version is None
    log.clear()
    assert engine.sync(PARAMS, version=1).tensors == len(PARAMS)
    assert log == ["closed", "start", "loaded"]  # it was never asleep


def test_an_engine_that_is_open_gets_weights_where_it_lacks_them_and_sleeps_at_its_end():
    engine, log = started(("turn", DIED), ("turn", DIED), sleep=True, restarts=2)
    how = {"sampling": Sampling(max_tokens=1), "key": Key(0)}
    newer = {name: x + 1 for name, x in PARAMS.items()}
    with engine.open(PARAMS, version=4, most_waiting=1) as requests:
        assert requests.limit == 128
        assert log == ["turns by None", "loaded", "turns by None"]
        log.clear()
        requests.update(PARAMS, 4)
        assert log == ["turns by None"]
        requests.update(newer, 5)
        assert (engine.version, log) == (5, ["turns by None"] * 2 + ["loaded", "turns by None"])
        requests.add([Request(name="a", ids=(3, 4), **how)])
        with pytest.raises(QueueFull):
            requests.add([Request(name="b", ids=(3, 4), **how)])
        log.clear()
        with pytest.warns(RuntimeWarning, match="it died; rows that are open are read anew"):
            died = [requests.step().finished for _ in range(2)]
        assert died == [[], []]
        (found,) = requests.step().finished
        assert (found.tokens.tolist(), found.versions.tolist(), found.log_probs.tolist()) == ([3], [5], [-1.0])
        replaced = ["closed", "start", "loaded", "turns by None"]
        assert log == [*replaced, *replaced, "turn of [0], [] ended"]
        assert engine.replaced == 2
        log.clear()
    assert log == ["slept"]
    engine, log = started(("turn", DIED), restarts=0)
    with engine.open(PARAMS) as requests:
        requests.add([Request(name="a", ids=(3, 4), **how)])
        with pytest.raises(EngineDied) as raised:
            requests.step()
        assert "restarts = 0: it is not replaced again while it is open" in raised.value.__notes__[-1]
        assert engine.version is None


def test_parameters_of_another_model_are_not_begun_to_be_sent():
    engine, log = started()
    first, *rest = sorted(PARAMS)
    fewer, more = {name: PARAMS[name] for name in rest}, {**PARAMS, "other": torch.ones(2)}
    for params, text in ((fewer, f"missing: .*{first}"), (more, "unknown: .*other")):
        with pytest.raises(SyncError, match=text):
            engine.sync(params, version=2)
        assert (engine.version, log) == (None, [])
    check(generate(engine))


def test_sleeping_and_waking():
    engine, log = started(sleep=True)
    for version in (1, 2):
        check(generate(engine, version))
        assert engine.version is None
    first = ["loaded", "asked for 12", "slept"]
    assert log == [*first, "woke weights", *first[:1], "woke kv_cache", *first[1:]]


def test_an_interruption_on_the_way_to_sleep_is_gone_on_from_by_a_new_start():
    engine, log = started(("sleep", KeyboardInterrupt()), sleep=True, restarts=0)
    engine.sync(PARAMS, version=1)
    with pytest.raises(KeyboardInterrupt):
        engine.sleep()
    log.clear()
    engine.sleep()  # there is nothing that could sleep
    check(generate(engine))
    assert log == ["closed", "start", "loaded", "asked for 12", "slept"]


def test_a_death_on_the_way_to_sleep_costs_no_row():
    engine, log = started(("sleep", DIED), sleep=True, restarts=0)
    with pytest.warns(RuntimeWarning, match="it died; all rows are done, a new one goes on"):
        check(generate(engine))
    assert engine.replaced == 1
    log.clear()
    check(generate(engine))
    assert log == ["closed", "start", "loaded", "asked for 12", "slept"]


def on_ranks(fates, fn, axis="shard", **how):
    """What `fn(engine, hosts, parts)` returns on two ranks, each with an engine and fates of its own, the list of its
    hosts and its part of the parameters."""

    def run(mesh):
        mesh, starts = attrs.evolve(mesh, sharding=Sharding()), Starts()
        model = models.place(MODEL, mesh)
        engine, _ = started(*fates[mesh[axis].rank], starts=starts, model=model, mesh=mesh, **how)
        return fn(engine, starts.hosts, models.own_params(model, PARAMS, mesh))

    return simulate({axis: 2}, run)


@pytest.mark.parametrize("send", ["all", "changed"])
@pytest.mark.parametrize("method", ["generate", "start", "begin_load", "take_in", "end_load"])
def test_ranks_go_on_together_when_a_replacement_of_one_dies(method, send):
    def run(engine, hosts, shards):
        rollouts = [
            engine.generate(shards, Ask(make_prompts(), SHORT, Key(0), version=version)) for version in (1, 1, 2)
        ]
        return rollouts, hosts[-1].got.keys(), engine.replaced

    with pytest.warns(RuntimeWarning, match="it died"):
        results = on_ranks([[], [("generate", DIED), (method, DIED)]], run, restarts=2, send=send)
    for rollouts, names, _ in results:
        assert names == PARAMS.keys()
        for rollout in rollouts:
            check(rollout)
    assert [replaced for *_, replaced in results] == [0, 2]


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
@pytest.mark.parametrize("method", ["begin_load", "take_in", "end_load"])
def test_a_sync_in_which_one_ranks_vllm_dies_is_none_on_any(method, axis):
    def run(engine, hosts, shards):
        with pytest.raises(EngineDied) as raised:
            engine.sync(shards, version=1)
        first = str(raised.value), engine.version
        version = engine.sync(shards, version=1).version
        assert hosts[-1].got == {name: digest(x) for name, x in PARAMS.items()}
        return first, version

    elsewhere, here = on_ranks([[], [(method, DIED)]], run, axis)
    assert elsewhere == (("the vLLM of another rank died during a sync", None), 1)
    assert here == (("it died", None), 1)


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_the_log_probs_that_vllms_are_held_against_are_the_models_on_any_mesh(axis):
    (probe,) = vllm_probe.probes(MODEL, 15)
    expected = vllm_probe.own_log_probs(MODEL, PARAMS, LOCAL, probe)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        model = models.place(MODEL, mesh)
        return vllm_probe.own_log_probs(model, models.own_params(model, PARAMS, mesh), mesh, probe)

    for found in simulate({axis: 2}, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@attrs.frozen
class InStep:
    """vLLM's side of a transfer whose ranks wait for each other after each tensor, as those of CUDA's IPC do."""

    info: Any
    client: Any
    source: Any

    def send_weights(self):
        self.client.start_weight_update()
        for name, x in self.source:
            self.client.update_weights({name: x})
            any_rank(True, self.info.mesh, torch.device("cpu"))
        self.client.finish_weight_update()

    def shutdown(self):
        pass


@pytest.fixture
def in_step(monkeypatch):
    """What vLLM makes of a transfer's info."""
    factory = ModuleType("vllm.distributed.weight_transfer.factory")
    factory.WeightTransferTrainerFactory = SimpleNamespace(trainer_init=InStep)
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    return partial(SimpleNamespace, backend="ipc")


@pytest.mark.parametrize("fates", [[("generate", DIED)], [("generate", DIED), ("start", DIED)], [("begin_load", DIED)]])
def test_ranks_whose_transfer_goes_in_step_restart_together(in_step, fates):
    """The parameters are whole on each of them: without the transfer each rank would sync alone."""

    def run(mesh):
        how = {"restarts": 2, "bucket_bytes": 1 << 14, "transfer": lambda options, size: in_step(mesh=mesh)}
        engine, _ = started(*(fates if mesh["replicate"].rank else ()), mesh=mesh, **how)
        return [generate(engine, version) for version in (1, 2)], engine.replaced

    with pytest.warns(RuntimeWarning, match="it died"):
        results = simulate({"replicate": 2}, run)
    for (rollouts, replaced), expected in zip(results, (0, len(fates)), strict=True):
        assert replaced == expected
        for rollout in rollouts:
            check(rollout)


def test_the_largest_tensor_fits_the_buffer_of_a_transfer(in_step):
    sizes = []

    def info(options, size):
        sizes.append(size)
        return in_step(mesh=LOCAL)

    largest = max(x.nbytes for x in PARAMS.values())
    for bucket in (1, 1 << 20):
        engine, _ = started(bucket_bytes=bucket, transfer=info)
        engine.sync(PARAMS, version=1)
    assert sizes == [largest, 1 << 20]
    assert 1 < largest < 1 << 20


def test_memory_that_torch_keeps_is_given_back_before_vllm_wakes_or_starts(monkeypatch):
    engine, log = started(sleep=True)
    generate(engine)
    log.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("given back"))
    generate(engine, version=2)
    assert log == [*("given back", "woke weights", "loaded", "given back", "woke kv_cache", "asked for 12", "slept")]
    log.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(remote, "LocalHost", lambda *_, **__: log.append("start"))
    remote.start_host(MODEL, VllmOptions(), "float32")
    assert log == ["given back", "start"]


def test_weights_that_are_not_those_sent_are_held_by_nobody():
    starts = Starts()
    engine, _ = started(starts=starts)
    engine.sync(PARAMS, version=0)
    (host,), wrong = starts.hosts, "model.norm.weight"
    end_load = host.end_load
    for got, message in (
        (lambda: (end_load()[0] | {wrong: "0"}, []), f"changed on the way: {wrong}$"),
        (lambda: (end_load()[0], [wrong]), rf"left parameters as they were: \['{wrong}'\]"),
    ):
        host.end_load = got
        with pytest.raises(SyncError, match=message):
            engine.sync(PARAMS, version=1)
        assert engine.version is None
    host.end_load = end_load
    engine.sync(PARAMS, version=1)
    assert starts.hosts == [host]
