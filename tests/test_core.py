"""Trees, keys, metrics and gradients."""

from __future__ import annotations

import copy
import hashlib

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fppo import metrics, tree
from fppo.grad import value_and_grad
from fppo.key import Key, uniforms
from fppo.tree import state, static


@state
class Pair:
    """A record with all kinds of fields."""

    params: dict[str, torch.Tensor]
    count: torch.Tensor
    step: int = 0
    name: str = static(default="pair")
    absent: torch.Tensor | None = None


def pair(**changes) -> Pair:
    made = Pair(params={"w": torch.ones(2, 3), "b": torch.zeros(3)}, count=torch.tensor(4.0))
    return tree.replace(made, **changes)


# trees


def test_a_state_is_frozen_and_keyword_only():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        pair().step = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Pair({}, torch.ones(1))  # type: ignore[misc]


def test_map_touches_tensors_only_and_keeps_structure():
    doubled = tree.map(lambda x: x * 2, pair(step=3, name="other"))
    assert doubled.count.item() == 8
    assert doubled.params["w"].sum() == 12
    assert (doubled.step, doubled.name, doubled.absent) == (3, "other", None)


def test_absent_and_static_fields_are_no_leaves_and_come_back():
    leaves, spec = pytree.tree_flatten(pair())
    assert len(leaves) == 4
    again = pytree.tree_unflatten(leaves, spec)
    assert (again.absent, again.name) == (None, "pair")
    present = pytree.tree_flatten(pair(absent=torch.ones(1)))
    assert len(present[0]) == 5
    assert present[1] != spec
    assert pytree.tree_flatten(pair(name="other"))[1] != spec


def test_paths_read_like_code():
    assert [p for p, _ in tree.leaves_with_paths(pair())] == [".params['w']", ".params['b']", ".count", ".step"]


def test_replace_makes_a_new_record_and_refuses_unknown_fields():
    old = pair()
    assert tree.replace(old, step=5).step == 5
    assert old.step == 0
    with pytest.raises(ValueError, match=r"no field \['stpe'\]"):
        tree.replace(old, stpe=1)


def test_add_and_copy():
    a = pair()
    both = tree.map(torch.add, a, tree.map(torch.ones_like, a))
    assert both.count.item() == 5
    copied = tree.copy(a)
    copied.params["w"].add_(1)
    assert a.params["w"].sum() == 6


def test_donate_moves_the_memory_and_leaves_nothing():
    old = pair()
    address = old.params["w"].data_ptr()
    moved = tree.donate(old)
    assert moved.params["w"].data_ptr() == address
    assert moved.params["w"].sum() == 6
    assert old.params["w"].numel() == 0
    with pytest.raises(RuntimeError):
        torch.mv(old.params["w"], torch.ones(3))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.nn.Parameter])
def test_a_use_of_what_was_donated_names_the_donation(shape, kind):
    """Also of leaves that would broadcast against an empty one."""
    old = {"x": kind(torch.ones(shape))}
    moved = tree.donate(old)["x"]
    assert moved.sum() == max(1, moved.numel())
    left, layer = old["x"], torch.nn.Linear(3, 2)
    assert (left.numel(), left.shape, left.dtype, repr(left)) == (0, (0,), torch.float32, "Donated()")
    for use in (
        lambda: left + 1,
        lambda: moved * left,
        lambda: left.to(torch.float64),
        lambda: torch._foreach_mul([left], 2.0),
        lambda: torch.func.functional_call(layer, {"weight": left}, torch.ones(1, 3)),
        lambda: tree.copy(old),
        lambda: tree.digest(old),
        lambda: tree.donate(old),
    ):
        with pytest.raises(RuntimeError, match=r"was donated.*Use that state, or call without donation"):
            use()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_digest_sees_every_bit(dtype):
    x = torch.zeros(3, 2).to(dtype)
    y = x.clone()
    y[2, 1] = 1
    digests = {
        tree.digest({"x": v})["['x']"] for v in (x, y, x.reshape(2, 3), x.to(torch.int8), x[:0], torch.tensor(0.0))
    }
    assert len(digests) == 6
    assert tree.digest({"x": x}) == tree.digest({"x": torch.zeros(2, 3).to(dtype).T})
    assert tree.combine(tree.digest({"x": x})) != tree.combine(tree.digest({"x": y}))


# keys


def test_folding_names_places():
    key = Key(7)
    assert key.fold("step", 3) == key.fold("step").fold(3)
    places = [key, key.fold(0), key.fold(1), key.fold(-1), key.fold("a"), key.fold("b"), key.fold(1, 2), key.fold(2, 1)]
    assert len({k.seed for k in places}) == len(places)


def test_generators_of_equal_keys_are_equal_and_fresh():
    key = Key(3).fold("noise")
    assert torch.equal(torch.rand(4, generator=key.generator()), torch.rand(4, generator=key.generator()))
    assert not torch.equal(torch.rand(4, generator=key.generator()), torch.rand(4, generator=key.fold("x").generator()))


@given(st.integers(0, 2**64 - 1), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_a_draw_depends_on_its_key_row_and_column_alone(seed, rows, columns, order_seed):
    key, numbers = Key(seed), torch.arange(rows) * 1000 - 2
    draws = key.uniform(numbers, columns)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(order_seed))
    assert torch.equal(key.uniform(numbers[order], columns), draws[order])
    assert torch.equal(key.uniform(numbers, columns + 3)[:, :columns], draws)
    assert torch.equal(key.uniform(numbers, torch.tensor([columns - 1])), draws[:, -1:])
    assert draws.dtype == torch.float64
    assert ((draws >= 0) & (draws < 1)).all()


def test_draws_are_uniform_and_uncorrelated():
    draws = Key(0).uniform(torch.arange(400), 400)
    counts = torch.histc(draws.float(), bins=16, min=0, max=1)
    assert ((counts - 10000).abs() < 5 * 100).all()
    centred = draws - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), Key(1).uniform(torch.arange(400), 400) - 0.5):
        assert (centred * other).mean().abs() < 5 / 12 / 400


BITS = (1 << 64) - 1


def mixed(x):
    """splitmix64's output for the state before it is raised, as its authors' C code computes it."""
    x = (x + 0x9E3779B97F4A7C15) & BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def drawn(key, row, column):
    """The number of a row and a column, in integers."""
    return (mixed(mixed((row & BITS) ^ mixed(key.seed)) ^ (column & BITS)) >> 11) / 2**53


def test_the_generator_is_splitmix64():
    """The first outputs from the state 0 are published with it."""
    states = [(i * 0x9E3779B97F4A7C15) & BITS for i in range(3)]
    assert [mixed(x) for x in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


whole = st.integers(0, BITS) | st.integers(0, 3) | st.integers(BITS - 2, BITS)
rows_of = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2), min_size=1, max_size=3)


@settings(max_examples=30)
@given(whole, rows_of, rows_of)
def test_a_draw_is_what_its_definition_gives_in_integers(seed, rows, columns):
    """Runs that go on with a later version draw the same; also where columns or keys differ by row."""
    key, numbers = Key(seed), torch.tensor(rows)
    expected = [[drawn(key, row, column) for column in columns] for row in rows]
    assert key.uniform(numbers, torch.tensor(columns)).tolist() == expected
    own = torch.tensor([[column + i for column in range(2)] for i in range(len(rows))])
    by_row = [[drawn(key, row, i + j) for j in range(2)] for i, row in enumerate(rows)]
    assert key.uniform(numbers, own).tolist() == by_row
    keys = [key.fold(i) for i in range(len(rows))]
    assert uniforms(keys, rows, own).tolist() == [
        [drawn(each, row, i + j) for j in range(2)] for i, (each, row) in enumerate(zip(keys, rows, strict=True))
    ]


@given(whole, st.lists(st.integers(-3, BITS) | st.text(max_size=3), max_size=3))
def test_a_folded_key_is_what_its_definition_gives(seed, path):
    x = seed
    for item in path:
        text = item.encode() if isinstance(item, str) else b""
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") if text or item == "" else item
        x = mixed(x ^ mixed(number & BITS))
    assert Key(seed).fold(*path) == Key(x)
    assert Key(seed).fold(*path).generator().initial_seed() == x % 2**63


@pytest.mark.parametrize("seed", [1 << 64, -1])
def test_a_seed_beyond_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match=r"seed = .* must be 0 to 2\*\*64 - 1"):
        Key(seed)
    Key((1 << 64) - 1).uniform(torch.arange(2), 2)


def test_neighbouring_seeds_share_no_numbers():
    draws = [set(Key(seed).uniform(torch.arange(64), 8).flatten().tolist()) for seed in range(4)]
    assert len(set.union(*draws)) == 4 * 64 * 8


# metrics


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_metrics_add_over_any_split(count, pieces, seed):
    g = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(count, 3, generator=g), torch.rand(count, 3, generator=g) < 0.7
    mask[0, 0] = True

    def measure(a, m):
        return {
            "mean": metrics.masked_mean(a, m),
            "sum": metrics.total(a.double().where(m, 0.0).sum()),
            "max": metrics.masked_max(a, m),
            "min": metrics.masked_min(a, m),
        }

    merged = metrics.merge(*(measure(a, m) for a, m in zip(x.chunk(pieces), mask.chunk(pieces), strict=True)))
    whole = metrics.report(measure(x, mask))
    assert metrics.report(merged) == pytest.approx(whole)
    assert whole["mean"] == pytest.approx(x[mask].mean().item(), abs=1e-6)
    assert (whole["max"], whole["min"]) == (x[mask].max().item(), x[mask].min().item())


def test_what_is_masked_does_not_matter():
    x, mask = torch.tensor([1.0, torch.nan, torch.inf, 3.0]), torch.tensor([True, False, False, True])
    found = metrics.report(
        {"a": metrics.masked_mean(x, mask), "b": metrics.masked_max(x, mask), "c": metrics.masked_min(x, mask)}
    )
    assert found == {"a": 2.0, "b": 3.0, "c": 1.0}
    empty = metrics.report({"a": metrics.masked_mean(x, mask & False), "b": metrics.masked_max(x, mask & False)})
    assert empty["a"] != empty["a"]
    assert empty["b"] == -torch.inf


def test_a_metric_has_one_kind():
    x = torch.ones(1)
    with pytest.raises(ValueError, match="a Mean in one place and a Max in another"):
        metrics.merge({"a": metrics.mean(1.0)}, {"a": metrics.masked_max(x, x > 0)})


def test_terms_add_within_a_mini_batch_and_are_averaged_over_mini_batches():
    x = torch.ones((), requires_grad=True)
    minis = [metrics.merge(*({"a": metrics.term(part * x)} for part in parts)) for parts in ((1.0, 2.0), (4.0,), ())]
    assert not minis[0]["a"].value.requires_grad
    assert metrics.report(minis[0]) == {"a": 3.0}
    assert metrics.report(metrics.merge(*map(metrics.settled, minis))) == {"a": 3.5}
    with pytest.raises(ValueError, match="a Term in one place and a Mean in another"):
        metrics.merge(minis[0], metrics.settled(minis[1]))


def test_metrics_hold_no_graph():
    x = torch.ones(2, requires_grad=True)
    made = (metrics.masked_mean(x, x > 0).total, metrics.masked_max(x, x > 0).value, metrics.mean(x.sum()).total)
    assert not any(t.requires_grad for t in made)


# gradients


def test_value_and_grad_is_torchs_gradient_as_a_tree():
    params = {"w": torch.tensor([1.0, 2.0]), "unused": torch.ones(3)}
    before = copy.deepcopy(params)
    (loss, aux), grads = value_and_grad(lambda p, y: ((p["w"] * y).square().sum(), {"y": p["w"]}), has_aux=True)(
        params, 3.0
    )
    assert loss.item() == 45.0
    assert not loss.requires_grad
    assert not aux["y"].requires_grad
    assert grads["w"].tolist() == [18.0, 36.0]
    assert grads["unused"].tolist() == [0.0] * 3
    assert not params["w"].requires_grad
    assert tree.digest(params) == tree.digest(before)


def test_value_and_grad_of_a_constant_is_zero_and_works_under_no_grad():
    with torch.no_grad():
        loss, grads = value_and_grad(lambda p: p.square().sum())(torch.tensor([3.0]))
    assert (loss.item(), grads.item()) == (9.0, 6.0)
    assert value_and_grad(lambda p: torch.tensor(2.0))(torch.ones(2))[1].tolist() == [0.0, 0.0]


def test_value_and_grad_differentiates_by_the_first_argument_alone_and_passes_on_all_others():
    other = torch.tensor([2.0, 3.0], requires_grad=True)

    def loss(params, factor, *, power, shift=0.0):
        return (params[0] * factor).sum() ** power + shift + 0 * params[1]["x"].sum(), factor * 2

    params = (torch.tensor([1.0, 2.0], requires_grad=True), {"x": torch.ones(2, 2)})
    (value, aux), grads = value_and_grad(loss, has_aux=True)(params, other, power=2, shift=1.0)
    assert (value.item(), aux.tolist()) == (65.0, [4.0, 6.0])
    assert (type(grads), grads[0].tolist()) == (tuple, [32.0, 48.0])
    assert grads[1]["x"].tolist() == [[0.0] * 2] * 2
    assert other.grad is None
    assert not any(x.requires_grad for x in (value, aux, *tree.tensors(grads)))


@pytest.mark.parametrize("has_aux", [False, True])
def test_value_and_grad_inside_transforms_is_that_of_each_entry(has_aux):
    params, ys = (
        {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)},
        torch.arange(6.0, dtype=torch.float64).view(3, 2),
    )

    def loss(params, y, *, scale):
        value = scale * (params["w"] * y).sum() ** 3
        return (value, {"y": y * params["w"]}) if has_aux else value

    one = value_and_grad(loss, has_aux=has_aux)
    expected = [one(params, y, scale=2.0) for y in ys]
    found = torch.func.vmap(lambda y: one(params, y, scale=2.0))(ys)
    for number, each in enumerate(expected):
        torch.testing.assert_close(tree.map(lambda x, number=number: x[number], found), each)
    second = torch.func.jacrev(lambda p: one(p, ys[1], scale=2.0)[1]["w"])(params)["w"]
    dot = float((params["w"] * ys[1]).sum())
    torch.testing.assert_close(second, 12.0 * dot * torch.outer(ys[1], ys[1]))


@state
class Wider(Pair):
    """A record that extends another."""

    more: torch.Tensor
    kind: int = static(default=1)


def test_a_record_that_extends_another_is_a_node_of_its_own_with_the_other_s_fields_first():
    made = Wider(**{f.name: getattr(pair(), f.name) for f in attrs.fields(Pair)}, more=torch.ones(1), kind=2)
    paths = [".params['w']", ".params['b']", ".count", ".step", ".more"]
    assert [path for path, _ in tree.leaves_with_paths(made)] == paths
    again = pytree.tree_unflatten(*pytree.tree_flatten(made))
    assert (type(again), again.kind, again.name, again.absent) == (Wider, 2, "pair", None)
    assert tree.digest(again) == tree.digest(made)
    changed = tree.replace(made, kind=3, absent=torch.ones(2), step=7)
    assert (type(changed), changed.kind, changed.step, made.step) == (Wider, 3, 7, 0)
    assert [path for path, _ in tree.leaves_with_paths(changed)] == [*paths[:-1], ".absent", ".more"]
    assert pytree.tree_flatten(changed)[1] != pytree.tree_flatten(tree.replace(changed, kind=2))[1]


def test_a_combined_digest_is_of_paths_and_values_in_any_order():
    one = tree.digest({"a": torch.ones(2), "b": 1, "c": None})
    assert tree.combine(one) == tree.combine(dict(reversed(one.items())))
    paths = list(one)
    swapped = {**one, paths[0]: one[paths[1]], paths[1]: one[paths[0]]}
    assert tree.combine(swapped) != tree.combine(one)
    assert tree.combine({path: one[path] for path in paths[:2]}) != tree.combine(one)
    digests = [tree.digest(x)[""] for x in (1, 1.0, True, "1", "a", None, torch.tensor(1), torch.tensor(1.0))]
    assert len({*digests}) == len(digests)


def test_a_value_that_is_elsewhere_is_named_by_its_path_and_kept_by_maps():
    away = tree.Away()
    whole = pair(absent=away)
    for call, wanted in (
        (tree.copy, "a copy"),
        (tree.digest, "its digest"),
        (lambda x: tree.check_here(x, "it"), "it"),
    ):
        with pytest.raises(TypeError, match=rf"\.absent is .*; compute {wanted} there"):
            call(whole)
        with pytest.raises(TypeError, match=r"^this is "):
            call(away)
    assert tree.map(torch.neg, whole).absent is away
    assert tree.donate(whole).absent is away
    tree.check_here(pair(), "it")


def test_a_map_over_several_trees_takes_their_tensors_in_step_and_the_first_s_other_leaves():
    first, second = pair(step=3), pair(step=4, count=torch.tensor(5.0))
    found = tree.map(lambda x, y, z: 100 * x + 10 * y + z, first, second, tree.map(torch.zeros_like, first))
    assert (found.count.item(), found.step) == (450.0, 3)
    assert found.params["w"].tolist() == [[110.0] * 3] * 2
    assert [x.sum().item() for x in tree.tensors(first)] == [6.0, 0.0, 4.0]


def test_a_loss_that_reads_nothing_has_gradients_of_zeros_like_the_tree():
    params = {"b": torch.ones(2, 3), "a": [torch.ones(4, dtype=torch.float64)]}
    for fn in (lambda p: torch.tensor(2.0), lambda p: p["b"].sum()):
        _, grads = value_and_grad(fn)(params)
        assert [x.shape for x in tree.tensors(grads)] == [x.shape for x in tree.tensors(params)]
        assert [x.dtype for x in tree.tensors(grads)] == [x.dtype for x in tree.tensors(params)]
        assert list(grads) == ["b", "a"]
        assert not grads["a"][0].any()
