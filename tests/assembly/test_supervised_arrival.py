"""Every setting of a supervised run reaches what it names, and nothing else; what cannot be opened is named at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fppo.assembly.supervised import assemble_supervised, collated
from fppo.key import Key
from fppo.settings import files
from tests import tiny_run
from tests.assembly.walk import differing, walked
from tests.runs.test_supervised import settings_of

SUPERVISED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft": (
        {
            "sft__batch_size": 4,
            "sft__weight_mode": "seq-mean-token-sum-norm",
            "sft__horizon": 9,
            "sft__micro_batch_size": 3,
            "sft__epochs": 3,
            "sft__optimizer__lr": 0.5,
            "sft__optimizer__schedule": "linear",
            "sft__optimizer__warmup_steps": 2,
            "sft__optimizer__min_lr_ratio": 0.25,
            "sft__optimizer__weight_decay": 0.375,
            "seed": 5,
            "data__may_change": True,
        },
        {
            "steps": 8,  # three times ten rows by four
            "may_change": True,
            "key": Key(5).seed,
            "imitation.steps": 8,
            "imitation.draw.1": 4,
            "imitation.draw.2": Key(5).fold("data").seed,
            "imitation.update.loop.mini_batch_size": 4,
            "imitation.update.loop.micro_batching.size": 3,
            "imitation.update.loop.micro_batching.token_budget": None,
            "imitation.update.loop.weight_mode": "seq-mean-token-sum-norm",
            "imitation.update.loop.horizon": 9,
            "imitation.update.loop.timeline.warmup": 2,
            "imitation.update.loop.timeline.total": 8,
            "imitation.update.optimizer.update.schedule.peak": 0.5,
            "imitation.update.optimizer.update.schedule.kind": "linear",
            "imitation.update.optimizer.update.schedule.warmup_steps": 2,
            "imitation.update.optimizer.update.schedule.min_ratio": 0.25,
            "imitation.update.optimizer.update.schedule.total": 8,
            "imitation.update.optimizer.update.weight_decay": 0.375,
            "evaluate.batches.1": 4,
            "evaluate.policy.micro_batching.size": 3,
            "evaluate.policy.micro_batching.token_budget": None,
        },
    ),
    "model": (
        {"model__remove_padding": False, "data__shuffle": False, "sft__token_budget": 77, "eval__max_prompts": 3},
        {
            "imitation.draw.4": False,
            "imitation.update.forward.remove_padding": False,
            "imitation.update.loop.micro_batching.token_budget": 77,
            "evaluate.batches.0": 3,
            "evaluate.policy.forward.remove_padding": False,
            "evaluate.policy.micro_batching.token_budget": 77,
        },
    ),
    "rows": (
        {"sft__max_tokens": 5, "data__over_long": "drop"},
        {"imitation.draw.0": 9, "evaluate.batches.0": 9},
    ),
}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demonstrations")
    tiny_run.write_task(directory)
    rows = [{"prompt": f"{a}+1", "response": str(a + 1), "from": f"s{a % 2}"} for a in range(10)]
    for name in ("train", "test"):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def imitated(directory, **changes):
    """All plain values of a supervised run of these settings."""
    settings, made = assemble_supervised(settings_of(directory, **changes))
    run = {"steps": settings.steps, "key": made.run.key, "may_change": made.drawn.may_change}
    return walked({"imitation": made.imitation, "evaluate": made.evaluate, **run})


@pytest.mark.parametrize("name", SUPERVISED)
def test_settings_of_a_supervised_run_reach_what_they_name_and_nothing_else(demonstrations, name):
    changes, expected = SUPERVISED[name]
    assert differing(imitated(demonstrations), imitated(demonstrations, **changes)) == expected


def test_a_ratio_warms_up_over_that_part_of_the_updates_rounded_down(demonstrations):
    """29 % of 100 updates are 29, whatever the product of the floats is; as many as data and passes over it make."""
    for how, warmup in (({"sft__epochs": None, "steps": 100}, 29), ({"sft__epochs": 3, "sft__batch_size": 4}, 2)):
        how |= {"sft__optimizer__schedule": "constant"}
        given = imitated(demonstrations, **how, sft__optimizer__warmup_steps=warmup)
        assert imitated(demonstrations, **how, sft__optimizer__warmup_ratio=0.29) == given


def test_demonstrations_come_in_their_order_where_they_are_not_shuffled(demonstrations):
    _, made = assemble_supervised(settings_of(demonstrations, data__shuffle=False, sft__batch_size=4))
    cursor, drawn = made.run.cursor, []
    for _ in range(2):
        batch, cursor = made.imitation.draw(cursor)
        drawn.append(batch.tokens)
    rows = [collated(made.inputs.demonstrations, range(first, first + 4), made.device).tokens for first in (0, 4)]
    for got, expected in zip(drawn, rows, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [1, 3, 10, 12])
def test_held_out_demonstrations_come_once_each_in_order_with_their_sources(demonstrations, size):
    """As many at a time as the run imitates in a step."""
    changes = {"data__eval_path": str(demonstrations / "test.jsonl"), "sft__epochs": None, "steps": 1}
    _, made = assemble_supervised(settings_of(demonstrations, sft__batch_size=size, **changes))
    assert made.evaluate is not None
    batches = list(made.evaluate.batches())
    assert [len(sources) for _, sources in batches] == [min(size, 10 - first) for first in range(0, 10, size)]
    held_out = made.inputs.held_out_demonstrations
    assert tuple(source for _, sources in batches for source in sources) == held_out.sources
    rows = collated(held_out, range(10), made.device)
    real = [x.tokens[each][x.attention_mask[each]].tolist() for x, names in batches for each in range(len(names))]
    assert real == [rows.tokens[row][rows.attention_mask[row]].tolist() for row in range(10)]


@pytest.mark.parametrize(("epochs", "size", "steps"), [(1, 4, 3), (1, 5, 2), (3, 10, 3), (1, 12, 1)])
def test_a_supervised_run_has_the_steps_of_so_many_passes_and_a_warm_up_that_ends_before(
    demonstrations, epochs, size, steps
):
    given = {"sft__epochs": epochs, "sft__batch_size": size}
    assert assemble_supervised(settings_of(demonstrations, **given))[0].steps == steps
    assemble_supervised(settings_of(demonstrations, **given, sft__optimizer__warmup_steps=steps - 1))
    with pytest.raises(ValueError, match=f"warmup_steps = {steps}: must be less than the run's {steps} updates"):
        assemble_supervised(settings_of(demonstrations, **given, sft__optimizer__warmup_steps=steps))


def attention_of_equal_lengths(q, k, v, *, lengths):
    """A kernel of one's own that knows no longer keys."""
    raise NotImplementedError


def test_all_that_a_supervised_run_cannot_open_is_named_at_once(demonstrations, monkeypatch):
    """The device, a logger, the rows, and a kernel on the axes of the settings."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own = {"model__attention": f"{__name__}:attention_of_equal_lengths", "mesh__context": 2}
    wrong = {"device": "cuda", "log__loggers": [f"{__name__}:no_logger"], "sft__max_tokens": 2}
    with pytest.raises(files.SettingsError) as caught:
        assemble_supervised(settings_of(demonstrations, **own, **wrong))
    device, logger, *rows, kernel = caught.value.problems
    assert device.startswith("device = 'cuda': torch sees no GPU here")
    assert logger.startswith("log.loggers")
    assert sum("more than max_tokens = 2" in row for row in rows) == len(rows) > 0
    assert "key_lengths" in kernel
