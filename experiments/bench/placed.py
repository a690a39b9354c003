"""What a step of a placed run takes beside its work, and what of the work overlaps, with each role on cores of its own.

    python experiments/bench/placed.py

The quickstart's model and batches, with a critic that is a model; actor, critic and reference in a pool each. Run it
on an idle machine: with fewer cores than pools there is nothing to overlap.
"""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import torch
import tyro

from fppo import metrics, models, quickstart
from fppo.assembly.pools import groups_of
from fppo.assembly.run import assemble
from fppo.fleet import Call
from fppo.key import Key
from fppo.pipeline.timing import Span, covered, spans
from fppo.pipeline.train import iterate
from fppo.settings import files, resolve
from fppo.settings.train import TrainSettings

PASSES, UPDATES = ("old_log_prob", "ref", "values"), ("update_actor", "update_critic")
ROLES = {"actor": "policy", "critic": "value", "reference": "fixed"}


def settings_of(directory: Path, batch: int, cluster: str) -> TrainSettings:
    """The quickstart's run with its roles in pools."""
    tokenizer = quickstart.character_tokenizer()
    model = quickstart.small_model(len(tokenizer))
    models.save(model, models.init_params(model, Key(0)), directory / quickstart.MODEL, tokenizer=tokenizer)
    rows = [f'{{"prompt": "{x.prompt}", "answer": "{x.answer}"}}' for x in quickstart.sums()[0]]
    (directory / quickstart.TRAIN).write_text("\n".join(rows) + "\n")
    changes = {
        "data.eval_path": [],
        "data.source": None,
        "eval.exact_values": False,
        "eval.every": 0,
        "actor.mini_batch_size": batch // 4,
        "critic.mini_batch_size": batch // 4,
        "rollout.batch_size": batch,
        "critic.reads": "tokens",
        "critic.epochs": 2,
        "placement.cluster": cluster,
        "placement.pools": {name: {"ranks": 1} for name in ROLES.values()},
        **{f"placement.roles.{role}": name for role, name in ROLES.items()},
    }
    settings = files.replace(quickstart.settings(directory, 0), changes)
    return resolve.resolved(files.check(attrs.evolve(settings, steps=10_000)), resolve.CPU)[0]


def pinned(cores: Sequence[int]) -> None:
    """Keeps this process to some cores, with a thread for each."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def measured(calls: Sequence[Call], ran: Sequence[Span], seconds: float) -> dict[str, float]:
    """The numbers of one step."""
    took = {span.stage: span.seconds for span in ran}
    at_work = [Span(call.label, start, length) for call in calls for start, length in call.ranks]
    ideal = took["gen"] + max(took.get(x, 0.0) for x in PASSES) + max(took.get(x, 0.0) for x in UPDATES)
    waited = [call.seconds - max(length for _, length in call.ranks) for call in calls]
    return {
        "a step, s": seconds,
        "while no rank works, s": seconds - covered(at_work),
        "of it, in the controller's own stages, s": sum(took.get(x, 0.0) for x in ("reward", "adv")),
        "beside a call's work, ms": 1e3 * statistics.median(waited),
        "calls": len(calls),
        "kB there": sum(call.there for call in calls) / 1e3,
        "kB back": sum(call.back for call in calls) / 1e3,
        "rollout + longest pass + longer update, s": ideal,
        "a step over that": seconds / ideal,
        "work of all ranks over a step": sum(span.seconds for span in at_work) / seconds,
    }


def main(steps: int = 20, batch: int = 512, cluster: str = "processes") -> None:
    """So many steps, after two that warm up. The cluster is `processes`, `local` or the address of a Ray cluster."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[number :: len(ROLES)] or [cores[number % len(cores)]] for number in range(len(ROLES))]
    torch.set_num_threads(len(shares[0]))
    with TemporaryDirectory() as place:
        settings = settings_of(Path(place), batch, cluster)
        with groups_of(settings) as places, assemble(settings, groups=places.roles) as assembly:
            if cluster == "processes":
                for group, share in zip(dict.fromkeys(places.roles.values()), shares, strict=True):
                    group.call(pinned, share)
            rows: list[dict[str, float]] = []
            for run, _, report in iterate(assembly.run, program=assembly.program, draw=assembly.draw, donate=True):
                seconds = metrics.report(report)["timing_s/step"]
                rows.append(measured(assembly.calls(), spans(report), seconds))
                if run.step == steps + 2:
                    break
    print(f"{torch.__version__}, {len(cores)} cores, batches of {batch}: medians of {steps} steps")
    for name in rows[0]:
        print(f"{name:<46}{statistics.median(row[name] for row in rows[2:]):10.3f}")


if __name__ == "__main__":
    tyro.cli(main)
