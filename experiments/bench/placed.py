"""What a step of a placed run takes beside its work, and what of the work overlaps, with each role on cores of its own.

    python experiments/bench/placed.py
    python experiments/bench/placed.py --device cuda         # all pools on the GPUs of this machine, be it one

The quickstart's model and batches, with a critic that is a model; actor, critic and reference in a pool each. Run it
on an idle machine: with fewer cores than pools there is nothing to overlap. First it says how the first steps compare
with those of one process.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch

from fppo import metrics, models, quickstart
from fppo.assembly import machine
from fppo.assembly.pools import groups_of
from fppo.assembly.run import Assembly, assemble
from fppo.fleet import HERE, Call, Here
from fppo.key import Key
from fppo.pipeline.timing import StageSpan, covered, spans
from fppo.pipeline.train import iterate
from fppo.runtime import digests
from fppo.settings import files
from fppo.settings.train import TrainSettings

PASSES, UPDATES = ("old_log_prob", "ref", "values"), ("update_actor", "update_critic")
ROLES = {"actor": "policy", "critic": "value", "reference": "fixed"}
COMPARED = 3  # steps


def settings_of(directory: Path, batch: int, device: str, changed: Mapping[str, Any] | None = None) -> TrainSettings:
    """The quickstart's run with a critic that is a model, in one process, with settings `changed` besides."""
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
        "critic.privileged": 0,
        "critic.epochs": 2,
        "device": device,
        **(changed or {}),
    }
    settings = files.replace(quickstart.settings(directory, 0), changes)
    return machine.resolved(files.check(attrs.evolve(settings, steps=10_000)))[0]


def in_pools(settings: TrainSettings, cluster: str) -> TrainSettings:
    """The run with each role in a pool of one rank: on a GPU of its own or, of fewer than pools, a share of one."""
    gpus = torch.cuda.device_count() if settings.device == "cuda" else 0
    share = 1.0 if gpus >= len(ROLES) else gpus / len(ROLES)
    changes = {
        "placement.cluster": cluster,
        "placement.pools": {name: {"ranks": 1, "gpus": share} for name in ROLES.values()},
        **{f"placement.roles.{role}": name for role, name in ROLES.items()},
    }
    return files.check(files.replace(settings, changes))


def where(here: Here) -> str:
    """What a rank works on."""
    if here.device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(here.device)}, number {os.environ['CUDA_VISIBLE_DEVICES']}"


def steps_of(assembly: Assembly, steps: int) -> tuple[list[dict[str, str]], list[dict[str, float]]]:
    """Digests of what the first steps made, batch and state, and the numbers of so many steps after them."""
    made: list[dict[str, str]] = []
    rows: list[dict[str, float]] = []
    of_state = digests.digest if assembly.placed is None else assembly.placed.digest
    for run, batch, report in iterate(assembly.run, program=assembly.program, draw=assembly.draw, donate=True):
        calls, seconds = assembly.calls(), metrics.report(report)["timing_s/step"]
        if run.step > COMPARED:
            rows.append(measured(calls, spans(report), seconds) if calls else {"a step, s": seconds})
        else:
            own = digests.digest(batch, "sums", device=assembly.device)
            state = of_state(run, "sums", device=assembly.device)
            made.append({f"batch{path}": x for path, x in own.items()} | {f"run{path}": x for path, x in state.items()})
        if run.step == COMPARED + steps:
            break
    return made, rows


def compared(alone: Sequence[dict[str, str]], placed: Sequence[dict[str, str]]) -> str:
    """How the steps of one process and of pools compare."""
    for step, (one, other) in enumerate(zip(alone, placed, strict=True), 1):
        differ = [path for path in one if one[path] != other[path]]
        if differ:
            return f"in step {step} {len(differ)} of {len(one)} differ, first {differ[0]}"
    return "equal, bit for bit"


def pinned(cores: Sequence[int]) -> None:
    """Keeps this process to some cores, with a thread for each."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def measured(calls: Sequence[Call], ran: Sequence[StageSpan], seconds: float) -> dict[str, float]:
    """The numbers of one step."""
    took = {span.stage: span.seconds for span in ran}
    at_work = [StageSpan(call.label, start, length) for call in calls for start, length in call.ranks]
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


def main(steps: int = 20, batch: int = 512, cluster: str = "processes", device: str = "cpu") -> None:
    """So many steps, after some that warm up. The cluster is `processes`, `local` or the address of a Ray cluster, the
    device `cpu` or `cuda`."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[number :: len(ROLES)] or [cores[number % len(cores)]] for number in range(len(ROLES))]
    torch.set_num_threads(len(shares[0]))
    with TemporaryDirectory() as place:
        plain = settings_of(Path(place), batch, device)
        settings = in_pools(plain, cluster)
        with assemble(plain) as assembly:
            alone, before = steps_of(assembly, steps)
        del assembly
        with (
            groups_of(settings.placement, settings.mesh, settings.device, settings.model_roles) as places,
            assemble(settings, places=places) as assembly,
        ):
            if cluster == "processes":
                for group, share in zip(dict.fromkeys(places.roles.values()), shares, strict=True):
                    group.call(pinned, share)
            for name, group in places.roles.items():
                print(f"{name:<12}{group.call(where, HERE)}")
            placed, rows = steps_of(assembly, steps)
    print(f"{torch.__version__}, {len(cores)} cores, batches of {batch}: medians of {steps} steps")
    print(f"the first {COMPARED} steps beside those of one process: {compared(alone, placed)}")
    print(f"{'a step of one process, s':<46}{statistics.median(row['a step, s'] for row in before):10.3f}")
    for name in rows[0]:
        print(f"{name:<46}{statistics.median(row[name] for row in rows):10.3f}")


if __name__ == "__main__":
    import tyro  # what gpu.py calls does without

    tyro.cli(main)
