"""Updates held against transformers' module: right ones pass, and each planted mistake is seen."""

from functools import partial

import attrs
import pytest
import torch

from fppo import laws, losses, tree
from fppo.laws import LawViolation
from fppo.steps.actor import PolicyTerms, UpdateActor

HOT = PolicyTerms(temperature=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [losses.ppo_clip, losses.gspo, losses.cispo, losses.gpg])
def test_an_update_is_the_gradient_of_the_expected_score(loss_fn):
    laws.check_update_gradient(partial(UpdateActor, loss_fn=loss_fn, terms=HOT), temperature=0.7)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_a_kl_term_is_that_of_the_distributions(kind):
    terms = attrs.evolve(HOT, kl_coef=0.3, kl_kind=kind)
    make = partial(UpdateActor, loss_fn=losses.ppo_clip, terms=terms)
    laws.check_update_gradient(make, temperature=0.7, kl_coef=0.3)


@pytest.mark.slow
def test_defaults_are_the_library_s_own_update():
    laws.check_update_gradient()
    laws.check_update_gradient(temperature=1.3, kl_coef=0.2)


def _made(change):
    """An update of batches that `change` has changed before."""

    def make(*, forward, loop, optimizer):
        own = UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)
        return lambda state, batch: own(state, change(batch))

    return make


WRONG = {
    "temperature": (partial(UpdateActor, loss_fn=losses.ppo_clip, terms=HOT), "the gradient of"),
    "shift": (_made(lambda b: tree.replace(b, tokens=b.tokens.roll(1, 1))), "the gradient of"),
    "sign": (_made(lambda b: tree.replace(b, advantages=-b.advantages)), "the gradient of"),
    "mask": (_made(lambda b: tree.replace(b, response_mask=b.response_mask & (torch.arange(2) < 1))), "gradient"),
    "weights": (_made(lambda b: tree.replace(b, correction_weights=None)), "the gradient of"),
    "kind": (
        partial(UpdateActor, loss_fn=losses.ppo_clip, terms=PolicyTerms(kl_coef=0.3, kl_kind="k3")),
        "the gradient of",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_seen(name):
    make, text = WRONG[name]
    with pytest.raises(LawViolation, match=text) as caught:
        laws.check_update_gradient(make, kl_coef=0.3 if name == "kind" else 0.0, name=name)
    assert caught.value.law == "expectation"
    assert str(caught.value).startswith(f'{name} breaks the law "expectation"')
    assert "26 rows in all" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "words"), [(True, "packed, in micro-batches of 3"), (False, "padded, in micro-batches of 26")]
)
def test_a_mistake_of_packed_or_of_padded_rows_alone_is_seen(packed, words):
    def make(*, forward, loop, optimizer):
        wrong = WRONG["sign"][0] if forward.remove_padding == packed else _made(lambda batch: batch)
        return wrong(forward=forward, loop=loop, optimizer=optimizer)

    with pytest.raises(LawViolation, match=f"ran {words} rows, 26 rows in all"):
        laws.check_update_gradient(make)


@pytest.mark.slow
def test_a_gradient_that_is_no_number_is_seen():
    def make(**how):
        own = _made(lambda batch: batch)(**how)

        def update(state, batch):
            state, report = own(state, batch)
            mu = {name: x.clone() for name, x in state.opt.mu.items()}
            mu["model.norm.weight"][3] = torch.nan
            return tree.replace(state, opt=tree.replace(state.opt, mu=mu)), report

        return update

    with pytest.raises(LawViolation, match=r"the gradient of model\.norm\.weight at \[3\] is nan"):
        laws.check_update_gradient(make)
