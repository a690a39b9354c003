"""The short scripts run, fit on a page, and print what they are for."""

import importlib.util
import itertools
import json
import math
import operator
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

import fppo
from fppo import models, quickstart, rewards, tree
from fppo.key import Key
from fppo.laws import updates
from fppo.rollout.turns.tools import evaluate
from fppo.runs import jsonl

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warmed_up():
    """A model that is right now and then: else every advantage of a group is 0, and nothing is trained."""
    return quickstart.warmed_up(Key(0), steps=80)


@pytest.fixture
def warm(warmed_up, monkeypatch):
    """Scripts start from that model, each from a copy of its parameters, instead of warming up one of their own."""
    tokenizer, model, params = warmed_up
    monkeypatch.setattr(quickstart, "warmed_up", lambda key, *, steps: (tokenizer, model, tree.copy(params)))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.py")), ids=lambda path: path.name)
def test_an_experiment_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_custom_loss(monkeypatch, capsys):
    """The laws of updates in some sizes: those between are for smaller counter-examples."""
    monkeypatch.setattr(updates, "SIZES", updates.SIZES[1::2])
    _load("custom_loss").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "spo keeps the laws."
    numbers = {line.rsplit(maxsplit=1)[0].strip(): float(line.rsplit(maxsplit=1)[1]) for line in lines[1:]}
    assert numbers["actor/skipped"] == 0
    assert numbers["advantages * change of log-probs"] > 10  # the policy went where the advantages point


@pytest.mark.slow
def test_alarms(tmp_path, monkeypatch, capsys):
    """Each run is a line of the file, and is not run again; the table counts those in which an alarm rang."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module, out = _load("alarms"), tmp_path / "alarms.jsonl"
    few = [attrs.evolve(case, steps=2) for case in module.cases(0, 1) if case.fault is not None or case.number == 0]
    monkeypatch.setattr(module, "cases", lambda first, rounds: few)
    module.main(str(out), warm_up=2)
    lines = jsonl.read(out)
    assert [(line["fault"], len(line["records"])) for line in lines] == [(case.fault, 3) for case in few]
    written = out.read_bytes()
    module.main(str(out), warm_up=2)
    assert out.read_bytes() == written
    clipped = [{"step": step, "actor/pg_clipfrac": 0.5} for step in range(4)]
    table = module.table([{"fault": None, "records": clipped}, {"fault": None, "records": clipped[:2]}])
    assert "| nothing | 2 | 1 | 2 | clip 1 |" in table
    assert len(capsys.readouterr().out.splitlines()) == 2 * (2 + 1 + len(module.FAULTS))


@pytest.mark.slow
def test_kuhn(tmp_path):
    more = ("steps=8", "rollout.environment.eval_episodes=256", "eval.every=0", "rollout.batch_size=256")
    assert _load("kuhn").main(tmp_path / "run", more=more) == 0
    scores = [
        row["val-core/environment/reward/mean@1"]
        for row in jsonl.read(tmp_path / "run" / "metrics.jsonl")
        if "val-core/environment/reward/mean@1" in row
    ]
    assert scores[-1] > scores[0] + 0.5


def test_the_best_replies_of_kuhn_win_what_the_script_says():
    kuhn, total = _load("kuhn"), 0.0

    def value(own, other, seat, moves, say, chance=1.0):
        if moves in kuhn.OVER:
            higher = ("JQK".index(own) > "JQK".index(other)) != bool(seat)
            return chance * kuhn.chips(moves, higher) * (-1 if seat else 1)
        if len(moves) % 2 == seat:
            return value(own, other, seat, moves + say[moves], say, chance)
        bets = kuhn.BETS[other]
        sides = (("b", bets), ("p", 1 - bets))
        return sum(value(own, other, seat, moves + move, say, chance * p) for move, p in sides)

    for own in "JQK":
        ways = [dict(zip(("", "p", "b", "pb"), says)) for says in itertools.product("pb", repeat=4)]
        total += max(sum(value(own, x, seat, "", w) for x in "JQK" if x != own for seat in (0, 1)) for w in ways)
    assert f"best replies win {total / 12:.3f}" in kuhn.__doc__


@pytest.fixture
def on_a_page(monkeypatch, tmp_path):
    """The scripts of torch.func, on a model that is hardly warmed up; its answers are right by chance."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    chance = rewards.inline_reward(lambda sample: float(sum(map(ord, sample.response)) % 2))
    monkeypatch.setattr(rewards, "exact_match", chance)
    return partial(_on_a_page, tmp_path / "picture.png")


def _on_a_page(picture, name, **arguments):
    result = _load(name).main(out=str(picture), warm_up=2, prompts=2, **arguments)
    with Image.open(picture) as image:
        assert len(set(image.convert("L").getdata())) > 10  # something is drawn
    return result


@pytest.mark.slow
def test_per_sample_gradients(on_a_page):
    assert math.isfinite(on_a_page("per_sample_gradients"))


@pytest.mark.slow
def test_hessian_vector(on_a_page):
    """More products find no smaller curvature: the vectors of fewer are among theirs."""
    few, more = (on_a_page("hessian_vector", iterations=count) for count in (2, 4))
    assert 0 < few <= more * 1.001


@pytest.mark.slow
def test_sweep_clip(on_a_page):
    found = on_a_page("sweep_clip", updates=3)
    clipped, moved = found["actor/pg_clipfrac"], found["actor/ppo_kl"]
    assert found["rewards"].shape == (1 + len(clipped),)
    assert (moved[:, 0].abs() < 1e-6).all()  # at first each is the policy that sampled
    assert (clipped[:, 1].diff() <= 0).all()  # and makes one step alike
    assert moved[:, 1].std() < 1e-3 * moved[:, 1].mean().abs()
    assert moved[0, 2] != moved[-1, 2]


def test_the_bench_of_micro_batching_prints_ratios(capsys):
    _load("bench/micro_batching").main(seeds=1)
    row = capsys.readouterr().out.splitlines()[2].split()
    assert float(row[3]) <= 1.01  # micro-batches over the bound
    assert float(row[7]) <= 1.0001  # the heaviest of 64 parts over the mean


@pytest.mark.slow
def test_the_bench_of_limits_says_which_runs_end_and_what_the_others_differ_by(monkeypatch, capsys):
    given = "--limits 2 --steps 2 --repeats 1 --width 16 --rows 8"
    monkeypatch.setattr("sys.argv", ["limits.py", *given.split()])
    _load("bench/limits").main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 4
    for tight, wide in zip(lines[::2], lines[1::2], strict=True):
        assert "does not fit into memory by itself" in tight
        assert int(wide.split()[3]) > 0
        assert float(wide.split()[5]) < 1e-12


def test_the_bench_of_engines_asks_prompts_of_many_lengths_and_counts_products(monkeypatch):
    rollout = _load("bench/rollout")
    for shortest in (8, rollout.PROMPT):
        mask = rollout.prompts_of("1M", shortest).attention_mask
        lengths = mask.sum(1)
        assert (lengths.min(), lengths.max()) == (shortest, rollout.PROMPT)
        assert (mask.int().diff(dim=1) >= 0).all()  # padding stands on the left
    # the products alone
    model, params = rollout.make("1M")
    monkeypatch.setattr(rollout, "_product", lambda rows, weights, clock: rows * sum(x.numel() for x in weights))
    head, matrices = 2048 * 128, sum(x.numel() for x in params.values() if x.dim() == 2)  # the head is the embedding
    assert rollout.products(model, params) == 64 * (127 * (matrices - head) + 64 * head)  # the last token goes nowhere


def test_the_bench_of_shared_prompts_says_what_is_computed():
    line = _load("bench/shared_prompts").compare("1M", "sdpa", (64, 8, 4, 2), rounds=1)
    tokens = float(re.search(r"tokens ([\d.]+),", line)[1])
    assert 1 / 4 < tokens < 0.4
    assert re.fullmatch(r"1M sdpa 64, 8, 4: tokens .*, pass [\d.]+ of [\d.]+ s, update [\d.]+ of [\d.]+ s", line)


@pytest.mark.slow
def test_the_bench_of_a_busy_machine_compares_each_way_alone_and_beside_others():
    command = [sys.executable, EXPERIMENTS / "bench" / "busy.py", "--ways", "asleep", "--rounds", "1", "--updates", "1"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    cells = [line.strip("| ").split(" | ") for line in printed if line.startswith("| asleep")]
    assert [row[0] for row in cells] == [f"asleep, {x}" for x in ("alone", "beside one", "beside two")]
    assert cells[0][3] == "1.00"
    assert all(float(row[1]) > 0 for row in cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_arithmetic", "grpo_arithmetic"])
def test_arithmetic(name, capsys):
    _load(name).main(steps=2, warm_up=2, batch=16)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    held_out = [line for line in lines if "  held out  reward " in line]
    assert [line.split("  ")[0] for line in held_out] == ["step 0/2", "step 2/2"]
    assert [line.split("  ")[0] for line in lines if line not in held_out] == ["step 1/2", "step 2/2"]


@pytest.mark.slow
def test_the_loop_and_the_pipeline_end_with_the_same_bits(warm, capsys):
    actor, critic = _load("ppo_loop").ppo(Key(3), count=3, warm_up=1, batch=64)
    printed = capsys.readouterr().out.splitlines()
    rewards = [float(line.split("reward")[1].split()[0]) for line in printed]
    run = _load("ppo_arithmetic").main(seed=3, steps=3, warm_up=1, batch=64)
    assert len(printed) == 3
    assert max(rewards) > 0  # else nothing of the scores would be compared
    assert run.step == 3
    assert tree.digest(actor) == tree.digest(run.actor)
    assert tree.digest(critic) == tree.digest(run.critic)


@pytest.mark.slow
def test_custom_advantage(warm, capsys):
    module = _load("custom_advantage")
    module.main(steps=2, batch=64)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "median_baseline keeps the laws."
    assert [line.split()[1] for line in lines[1:]] == ["1/2", "2/2"]
    scores, mask = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.ones(7, 2, dtype=torch.bool)
    result = module.median_baseline(scores, mask, torch.tensor([5, 5, 5, 2, 2, 2, 2]))
    assert result.advantages[:, 0].tolist() == [1, 0, 0, 0, 0, -1, 0]


@pytest.mark.slow
def test_kl_annealing(warm, capsys):
    _load("kl_annealing").main(steps=4, batch=64, start=0.4)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [float(words[words.index("coefficient") + 1]) for words in lines] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    divergence = [float(words[words.index("kl") + 1]) for words in lines]
    assert divergence[0] == 0  # before the first update the policy is the reference
    assert divergence[-1] != 0


@pytest.mark.slow
def test_placed_ppo():
    """As a script: what it sends to its ranks is its own."""
    command = [sys.executable, EXPERIMENTS / "placed_ppo.py", "--place", "processes", "--steps", "2", "--batch", "16"]
    done = subprocess.run([*command, "--warm-up", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("step")]
    assert lines == ["step 1/2", "step 2/2"]


@pytest.mark.slow
def test_best_of_n(warm, capsys):
    _load("best_of_n").main(steps=2, batch=64)
    lines = capsys.readouterr().out.splitlines()
    for line in lines[:2]:
        mean, best = (float(part.split()[0]) for part in line.split("reward ")[1].split("of the best "))
        assert best >= mean
    assert [line.rpartition(" ")[0] for line in lines[2:]] == ["held out, before:", "held out, after:"]


@pytest.mark.slow
def test_distill(capsys):
    run = _load("distill").main(steps=2, warm_up=2, batch=64)
    assert run.step == 2
    held_out = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert len(held_out) == 2
    assert all("reverse_kl" in line for line in held_out)


@pytest.mark.slow
def test_sdpo(capsys):
    module = _load("sdpo")
    module.main(seeds=2, steps=2, warm_up=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[::6] == ["sdpo", "rloo", "more"]
    assert lines[1].split(",")[0] == lines[7].split(",")[0]  # from one start
    assert lines[15].startswith("0.000 +- ")


@pytest.mark.slow
def test_entropy(warmed_up, tmp_path, capsys):
    tokenizer, model, params = warmed_up
    models.save(model, params, tmp_path / "task" / quickstart.MODEL, tokenizer=tokenizer)
    _load("entropy").main(steps=12, skip=1, prompts=4, out=str(tmp_path))
    lines = capsys.readouterr().out.splitlines()[-4:]
    for line, what in zip(lines, ("steps", "means of ten"), strict=False):
        assert re.fullmatch(rf"{what}: \d+% within a tenth, [\d.]+% off", line)
    assert lines[3].startswith("1.25 ")  # of the target, at the first step


def test_best_of_n_takes_the_first_of_the_best_rows():
    synthetic = _load("custom_loss").synthetic(8, 2, 3, 16, Key(0))
    scores = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0])
    best = _load("best_of_n").best_of(tree.replace(synthetic, scores=scores), 4)
    assert best.row_ids.tolist() == [1, 4]


@pytest.mark.slow
def test_two_actors(warm, capsys):
    module = _load("two_actors")
    assert module.main("ppo_clip", "ppo_clip", steps=2, batch=64) is None
    assert capsys.readouterr().out.splitlines()[-1] == "no difference"
    difference = module.main("ppo_clip", "dro", steps=2, batch=64)
    assert difference.part == "result"  # the losses part in an update: its batch was the same
    assert difference.leaf.startswith(".actor.params")
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"first difference: step {difference.step}, ")


def _word_problems(path, count, seed):
    """Rows like GSM8K's: a sum in words, and a solution with the calculation annotated."""
    draws = torch.randint(2, 99, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    sums = [(f"Tom has {a} apples and buys {b}.", f"{a}+{b}", a + b) for a, b in draws]
    lines = [{"question": q, "answer": f"{x} = <<{x}={value}>>{value}\n#### {value}"} for q, x, value in sums]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_gsm8k_with_a_calculator(tmp_path, monkeypatch):
    """The whole of it, small: every call that the policy makes is computed, and the policy trains behind it."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    _word_problems(tmp_path / "train.jsonl", 400, 0)
    _word_problems(tmp_path / "test.jsonl", 16, 1)
    small = ["steps=2", "rollout.batch-size=32", "rollout.max-tokens=48", "eval.every=0", "log.loggers=jsonl"]
    small += ["critic.mini-batch-size=32", "device=cpu"]
    run = tmp_path / "run"
    _load("gsm8k_calculator").main(tmp_path, run, warm_up=80, width=64, layers=1, more=tuple(small))
    first, *steps = jsonl.read(run / "metrics.jsonl")
    for line in steps:
        assert line["rollout/turns/max"] > 1
        assert line["rollout/observation_tokens/mean"] > 0
        assert line["actor/grad_norm"] > 0
    texts = fppo.open(run).samples(columns=["response"])["response"]
    calls = [call for text in texts for call in re.findall(r"<<([^<>=]*)=([^<>]*)>>", text)]
    computed = [evaluate(call) == value for call, value in calls if evaluate(call) is not None]
    assert len(computed) > 10
    assert all(computed)
    assert "val-core/test/reward/mean@1" in first


# what pip installs with fppo and a machine with a GPU may lack
NOT_NEEDED = (
    "cattrs",
    "tyro",
    "rich",
    "datasets",
    "dill",
    "xxhash",
    "matplotlib",
    "jaxtyping",
    "beartype",
    "hypothesis",
)
SECTIONS = ("attention", "gae", "adamw", "ragged", "update", "decode", "offload")
OTHERS = ("log_probs", "float8", "interrupt", "recorded", "collectives", "laws", "vllm")


def _dry_runs(directory, *sections, without=NOT_NEEDED):
    """The JSON of dry runs of the GPU's benchmark with these sections each, in a process without what those do not
    need; all but the first find xxhash, by which weights for vLLM are digested."""
    bench, paths = EXPERIMENTS / "bench", [directory / f"gpu-{number}.json" for number in range(len(sections))]
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({without}))
sys.path.insert(0, {str(bench)!r})
for path, sections in zip({[str(path) for path in paths]}, {sections}):
    sys.argv = ["gpu.py", "--dry-run", "--json", path, "--sections", *sections]
    try:
        runpy.run_path({str(bench / "gpu.py")!r}, run_name="__main__")
    except SystemExit as end:
        print("exit", int(end.code))
    sys.modules.pop("xxhash", None)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    results = [json.loads(path.read_text()) for path in paths]
    verdicts = [verdict for result in results for verdict in result["verdicts"]]
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines.count("exit 0") == len(sections), [verdict for verdict in verdicts if "error" in verdict]
    assert sum(line.startswith(("PASS", "FAIL")) for line in lines) == len(verdicts)
    return results


@pytest.mark.slow
def test_dry_runs_of_the_gpus_benchmark_reach_their_verdicts(tmp_path):
    first, second = _dry_runs(tmp_path, SECTIONS, OTHERS)
    verdicts = {verdict["name"]: verdict for verdict in first["verdicts"]}
    assert {verdict["section"] for verdict in verdicts.values()} == {*SECTIONS} - {"attention"}
    exact = [f"decode, layers {how}: k3 to the trainer's log-probs" for how in ("eager", "eager, graphs")]
    exact += ["checkpoint: MiB that it pins"]
    exact += [f"offload = {how}: what differs, of what changed" for how in ("moments", "all")]
    for name in exact:
        assert verdicts[name]["passed"]
        assert abs(verdicts[name]["value"]) < 1e-6
    assert all(record["TFLOP/s"] > 0 for record in first["update"] if "TFLOP/s" in record)
    values = {verdict["name"]: verdict["value"] for verdict in second["verdicts"]}
    assert values["interrupt: k3 of the newer version's tokens"] < 1e-6
    assert 0 < values["float8: gap of gradients"] < 0.3
    held = [verdict for verdict in second["verdicts"] if "keeps its law" in verdict["name"]]
    errors = [verdict for verdict in second["verdicts"] if verdict["name"].endswith("error")]
    vllm = [verdict for verdict in second["verdicts"] if verdict["section"] == "vllm" and "GiB" not in verdict["name"]]
    assert len(held) >= 5
    assert len(errors) == 8
    assert len(vllm) == 3 * 7  # ways on two imagined GPUs
    assert all(verdict["passed"] for verdict in held + errors + vllm if not verdict["name"].endswith("GB/s"))


@pytest.mark.slow
def test_a_dry_run_of_exact_rollouts_has_a_ratio_of_one(tmp_path):
    (found,) = _dry_runs(tmp_path, ("exact",), without=())
    values = {verdict["name"]: verdict["value"] for verdict in found["verdicts"]}
    assert values["exact: the law of its engine (1: held)"] == 1
    assert values["exact, float32: log-probs with equal bits, of all"] == 1
    assert values["exact, float32: the ratio's distance from 1"] == 0
    assert {"exact over fast: update", "exact over fast: decode"} <= values.keys()


@pytest.mark.slow
def test_the_tables_of_families_say_what_their_checks_say(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    verdicts, tables = (importlib.import_module(f"kinds.{x}") for x in ("verdicts", "page"))
    kinds = ("qwen2", "gpt2", "bloom", "llava")
    printed = tables.page({kind: verdicts.verdict_of(kind) for kind in kinds}).splitlines()
    assert printed[0] == "3 of 4 types run, 1 of them with images and 0 with videos."
    kept = (EXPERIMENTS.parent / "docs" / "results" / "families.md").read_text().splitlines()
    ours = [_cells(line) for line in printed if line.startswith("| `")]
    assert len(ours) > len(kinds)
    for types, *rest in ours:
        theirs = [_cells(line)[0] for line in kept if _cells(line)[1:] == rest]
        assert types <= set().union(*theirs)
    rows = [_cells(line) for line in kept if line.startswith("| `")]
    runs, refused = ([row for row in rows if len(row) == size] for size in (7, 2))
    sees, moves = (sum(row[column] == "yes" for row in runs) for column in (-2, -1))
    assert (
        f"{len(runs)} of {len(runs + refused)} types run, {sees} of them with images and {moves} with videos." in kept
    )
    readme, page = (" ".join((EXPERIMENTS.parent / x).read_text().split()) for x in ("README.md", "docs/families.md"))
    assert f"{len(runs)} of the {len(runs + refused)} types" in readme
    assert f"{len(runs)} of {len(runs + refused)}, {sees} of them with images and {moves} with videos" in page
    published, cut, adapted = (sum(row[column] == "yes" for row in runs) for column in (2, 3, 4))
    for yes in (f"{published} |", f"{cut} |", f"{adapted} |", f"{sees}, {moves} |"):
        assert yes in page


def _cells(line):
    """The cells of a row, the first as the set of the types in it."""
    first, *rest = line.strip("| ").split(" | ")
    return [{*first.replace("`", "").split(", ")}, *rest]


def test_a_family_that_fails_or_hangs_is_one_line_of_the_page(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    in_process = importlib.import_module("kinds.process").in_process
    assert in_process(hex, 255, limit=600) == "0xff"
    assert in_process(os._exit, 3, limit=600) == "its checks end the process (exit code 3)"
    assert in_process(time.sleep, 600, limit=0.01) == "its checks take more than 0.01 s"


def test_the_images_to_see_are_what_their_answers_say(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    task = _load("sight/task")
    task.write(tmp_path, "train", 40, np.random.default_rng(0))
    task.write(tmp_path, "shown", 40, np.random.default_rng(1), described=0.5)
    wrong = dict.fromkeys(("colour?", "count?", "digit?"), 0)
    for line in (*jsonl.read(tmp_path / "train.jsonl"), *jsonl.read(tmp_path / "shown.jsonl")):
        image, described = Image.open(tmp_path / line["image"]), line["image"].startswith("shown")
        pixels = {rgb: count for count, rgb in image.getcolors(1024)}
        colours = {letter: pixels.get(ImageColor.getrgb(name), 0) for letter, name in task.COLOURS.items()}
        (colour,) = [letter for letter, count in colours.items() if count]
        squares = str(colours[colour] // 36) if len(pixels) == 2 else ""  # a digit's edges are of other shades
        truth = {"all?": colour + squares, "colour?": colour, "count?": squares, "digit?": ""}[line["prompt"]]
        if described and line["prompt"] != "all?":
            wrong[line["prompt"]] += line["answer"] != truth
        elif line["prompt"] == "digit?":
            assert task.draw(colour, line["answer"], "digit?", np.random.default_rng(0)).tobytes() == image.tobytes()
        else:
            assert line["answer"].startswith(truth)
    assert wrong["colour?"] > 2


@pytest.mark.slow
def test_see_runs_from_its_images_to_a_report_that_shows_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    small = ["steps=1", "rollout.batch-size=8", "actor.mini-batch-size=8", "critic.mini-batch-size=8"]
    small += ["log.loggers=jsonl", "log.samples=3"]
    _load("see").main(tmp_path, "cpu", warm_up=2, rows=24, more=tuple(small))
    metrics = jsonl.read(tmp_path / "metrics.jsonl")
    assert {name.split("/")[1] for name in metrics[-1] if name.startswith("val-core/")} <= {
        "colour?",
        "digit?",
        "count?",
    }
    assert (tmp_path / "report.html").exists()
    images = fppo.open(tmp_path).arrow(1, ["images"]).column("images").to_pylist()
    assert sum(x is not None for x in images) == 3


@pytest.mark.slow
def test_critic_matters_runs_every_method(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = _load("critic_matters")
    few = {"walk": ("mse", "rloo"), "bets, the same cards for a group": ("mse", "grpo"), "kuhn": ("confidence", "rloo")}
    tasks = {name: attrs.evolve(task, methods=few.get(name, task.methods)) for name, task in module.TASKS.items()}
    assert {method for task in tasks.values() for method in task.methods} == {*module.TASKS["kuhn"].methods}
    monkeypatch.setattr(module, "TASKS", tasks)
    result = module.main(quick=True, workers=1, out=str(tmp_path))
    lines = capsys.readouterr().out
    runs = [(name, method) for name, task in module.TASKS.items() for method in task.methods]
    assert all(f"{name}  seed 0  {method}" in lines for name, method in runs)
    assert [(name, method) for name, methods in result.items() for method in methods] == runs
    curves = [made.curve for methods in result.values() for seeds in methods.values() for made in seeds.values()]
    assert all([step for step, _ in curve] == [16.0, 32.0] for curve in curves)
    assert all(0 <= score <= 1 for curve in curves for _, score in curve)
    assert (tmp_path / "critic_matters.png").stat().st_size > 5000
    assert (tmp_path / "critic_matters.md").read_text() in lines
    kept = (tmp_path / "critic_matters.json").read_bytes()
    (removed, *rest) = sorted((tmp_path / "runs").glob("chain*"))
    removed.unlink()
    before = {path: path.stat().st_mtime_ns for path in rest}
    module.main(quick=True, workers=1, only="chain", out=str(tmp_path))
    assert removed.exists()  # run again, from the same start, with the same result
    assert {path: path.stat().st_mtime_ns for path in rest} == before
    assert json.loads((tmp_path / "critic_matters.json").read_bytes())["chain"] == json.loads(kept)["chain"]


@pytest.mark.slow
def test_the_table_of_critics_runs_every_way_to_read(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = _load("critic_table")
    few = (
        "none: `reinforce_plus_plus`",
        "`mse`, privileged",
        "`mse`, a small model",
        "`confidence`, privileged",
        "`hidden`, 4 members, 0.2 left",
    )
    monkeypatch.setattr(module, "KINDS", {name: module.KINDS[name] for name in few})
    results = module.main(quick=True, workers=1, out=str(tmp_path))
    assert [*results] == [*few]
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[2:]] == [*few]
    assert [row[4] for row in rows[2:]] == ["", "298,113", "9,889", "769", "33,284"]
    assert all(found[0].curve and not math.isnan(found[0].curve[0][1]) for found in [*results.values()][1:])


def test_the_table_of_critics_has_medians_while_there_is_something_to_know(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = _load("credit/known")

    def found(least, peak):
        curve = [(4, -9.0, 0.1), (6, least, 0.1), (8, least + 0.2, 0.005), (10, least + 0.1, 0.006), (12, 9.0, 0.004)]
        return module.Found(curve, 0.5, 2 + least, 1.0, 1200, peak)

    seeds = {0: found(0.5, 3.0), 1: found(0.1, None), 2: found(0.3, 4.0)}
    assert module.r2(seeds[0], 6) == 0.6
    row = module.markdown({"`mse`": seeds, "`huber`": {}}).splitlines()[-1]
    assert row == "| `mse` | 0.40 (0.20 to 0.60) | 2.30 | 1.00 | 1,200 | 4 | 0.500 | 3 |"
    assert module.r2(seeds[0], 12) is None


def test_jobs_that_are_done_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    jobs = _load("credit/jobs")
    ran: list[int] = []

    def run(job, bad=()):
        ran.append(job)
        if job in bad:
            raise ValueError(f"job {job} is bad")
        return {"twice": 2 * job}

    def results(numbers, run, about="this"):
        say = lambda job: {"job": job, "about": about}  # noqa: E731
        return jobs.results(numbers, run, say=say, workers=1, directory=tmp_path)

    first = results([1, 2, 3], partial(run, bad=(2,)))
    assert [next(first), next(first)] == [(1, {"twice": 2}), (3, {"twice": 6})]
    with pytest.raises(SystemExit, match="1 of 3 runs failed"):
        next(first)
    assert "job 2 is bad" in capsys.readouterr().err
    assert list(results([1, 2, 3, 4], run)) == [
        (1, {"twice": 2}),
        (3, {"twice": 6}),
        (2, {"twice": 4}),
        (4, {"twice": 8}),
    ]
    assert ran == [1, 2, 3, 2, 4]
    assert list(results([1], run, about="that")) == [(1, {"twice": 2})]
    assert ran[-1] == 1  # what is said of it is another thing


@pytest.mark.slow
def test_jobs_run_in_processes_of_one_thread_each(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    jobs = _load("credit/jobs")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert list(jobs.each([torch.get_num_threads] * 2, operator.call, workers=2)) == [1, 1]


def test_the_best_of_both_kinds_is_told_by_the_samples_that_all_seeds_need(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = _load("credit/table")
    rising = [(float(i), i / 10) for i in range(1, 11)]
    assert module.samples_to(rising, 0.5, 5) == 7.0  # the mean of steps 3 to 7
    assert module.samples_to(rising, 0.9, 5) == module.NEVER

    def made(start):
        curve = [(10.0 * i, float(i >= start)) for i in range(1, 21)]
        return module.Made(curve, seconds=2.0)

    starts = {"mse": 2, "rloo": 8, "grpo": 9}
    runs = {m: {seed: made(start + seed) for seed in range(2)} for m, start in starts.items()}
    text = module.markdown({"walk": runs})
    assert "| PPO, `mse` | 45 (40 to 50) | 1.0000 ± 0.0000 | 2 |" in text
    assert "| `rloo` | 105 (100 to 110) |" in text
    assert "`mse` needs 0.43 of the samples of `rloo` (seed by seed 0.4273" in text
    late = {"mse": {0: made(30), 1: made(2)}, "rloo": runs["rloo"]}
    assert "| PPO, `mse` | 40 (40 to 40), never: 1 of 2 seeds |" in module.markdown({"walk": late})
    assert "not all seeds of the first came to the goal" in module.markdown({"walk": late})
    never = {"mse": runs["mse"], "rloo": {0: made(30), 1: made(6)}}
    assert "`mse` needs at most 0.32 of the samples of `rloo`" in module.markdown(
        {"walk": never}
    )  # 45 of (200 + 80) / 2


def test_the_tasks_of_credit_score_what_they_say(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    tasks = _load("credit/tasks")
    assert tasks.chain_demonstration("41234012340", [0.0] * 20) == "0204402044"
    assert tasks.chain_score("41234012340", "0204402044") == 1.0
    assert tasks.chain_score("41234012340", "0204413100") == 0.9  # what follows from a wrong sum is right
    assert tasks.chain_score("41234012340", "") == 0.0
    assert tasks.walk_score("0022", "RRUU") == 1.0
    assert tasks.walk_score("0022", "LLRU") == 0.75
    assert tasks.walk_score("4444", "") == 1.0
    bets = tasks.bets
    hands = [("732", 1, 0), ("372", -1, 0), ("734", 3, 2), ("370", -3, -2)]
    assert [(hand, bets.gain(hand, "+"), bets.gain(hand, "-")) for hand, *_ in hands] == hands
    dealt = bets.deck([0.95, 0.99, 0.7] * bets.HANDS)
    assert dealt == "983" * bets.HANDS
    assert bets.shown(dealt, "") == "q9"
    assert bets.shown(dealt, "+-") == "t9"  # two chips of luck, and one won
    assert bets.score(dealt, "-" * bets.HANDS) == 1.0
    assert bets.score("180" * bets.HANDS, "+" * bets.HANDS) == 0.0
    assert bets.at_random(dealt, [0.6] * bets.HANDS).startswith("+s9+u9+")
    tokenizer = quickstart.character_tokenizer(bets.CHARACTERS)
    table = bets.table(None, tokenizer)
    assert table.encode([*"t9"]) == tokenizer.encode("t9")
    assert table.decode(tokenizer.encode("t9+")) == ["t", "9", "+"]


@pytest.mark.slow
def test_tinker_loop(warm, tmp_path, capsys):
    pytest.importorskip("tinker")
    _load("tinker_loop").main(tmp_path, steps=16, prompts=32)
    rewards = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(rewards) == 16
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.1  # each a mean of 256 answers
