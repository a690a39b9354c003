"""A plan in words and as JSON values, word for word, of a plan whose numbers are all different."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from fppo.models.adapted import Lora
from fppo.studies.plan import text
from fppo.studies.plan.case import GIB, PlannedSampling, Role, hardware_of
from fppo.studies.plan.columns import ColumnCall
from fppo.studies.plan.estimate import Rough, Seconds, WireTraffic
from fppo.studies.plan.host import HostMemory
from fppo.studies.plan.plan import Engines, Plan, Stage
from fppo.studies.plan.rollout import PlannedRollout
from fppo.studies.plan.search import Candidate, Remedy, SearchResult
from tests.studies.plan.cases import case

GPU = hardware_of("h100")
CASE = case(
    hardware=GPU,
    mesh={"shard": 2, "pipeline": 2},
    virtual_stages=1,
    micro_batches=3,
    tokens=256,
    length=64,
    compute_dtype=torch.bfloat16,
    checkpoint_layers="selective",
    offload="moments",
    offload_activations=True,
    forward_tokens=512,
    roles={
        "critic": Role(tokens=128, compute_dtype="float16", checkpoint_layers=True, offload="none"),
        "reference": Role(dtype=torch.bfloat16, offload="all"),
    },
    sampling=PlannedSampling(engine="vllm", sequences=24, n=2),
)
ROLLOUT = PlannedRollout(
    engines=3,
    gpus=2,
    rows=24,
    together=12,
    memory={"engine's weights": 5 * GIB, "keys and values": 7 * GIB},
    stays=1.5 * GIB,
    prefill=0.25,
    decode=11.5,
    gathered=2 * GIB,
    sent=3 * GIB,
    sending=0.75,
)
HOST = HostMemory(
    rest={"the process itself": 4 * GIB, "state between uses": 0.0},
    starting={"weights that are read": 6 * GIB},
    meanwhile={"copies for the checkpoint": 8 * GIB},
)


def stage(name: str, scale: float, **changes: Any) -> Stage:
    memory = {"actor's parameters": 10 * GIB, "activations": scale * GIB}
    wire = {"shard": WireTraffic(2 * scale * GIB, 9.0, 0.5), "pipeline": WireTraffic(3 * scale * GIB, 5.0, 0.25)}
    seconds = Seconds(10 * scale, 4 * scale, scale, 0.5 * scale, 2 * scale)
    return Stage(name, "backward 1", memory, wire, seconds, scale * 3e15, **changes)


LOG_PROBS = attrs.evolve(stage("log-probs", 1.0), model_flops=6e15)  # so that its MFU is not that of the updates
STAGES = LOG_PROBS, stage("update critic", 3.0), stage("update actor", 2.0, recorded=True)
PLAN = Plan(
    CASE,
    {"actor": 1_500_000_000, "critic": 2_250_000_000},
    {"actor's parameters": 10 * GIB},
    STAGES,
    imbalance=1.25,
    rollout=ROLLOUT,
    host=HOST,
)
SMALL = attrs.evolve(PLAN, case=attrs.evolve(CASE, hardware=attrs.evolve(GPU, memory=12 * GIB)))


def words(sections: Any) -> str:
    """The text without its lines and rules."""
    return " ".join(word for word in text.rendered(sections).split() if word.strip("-"))


MFU_OF_UPDATES = f"{15e15 / (57.5 * GPU.flops):.0%}"
MFU_OF_LOG_PROBS = f"{6e15 / (11.5 * GPU.flops):.0%}"
MFU = f"{3e15 / (11.5 * GPU.flops):.0%}"
HEAD = (
    "small: actor 1.50 B, critic 2.25 B parameters; bfloat16 passes on float32 state, layers recomputed but for "
    "attention, moments on the host, activations on the host "
    "critic: passes of 128 tokens, float16 passes, layers recomputed, on the device "
    "reference: on the host, kept in bfloat16 "
    "without a gradient: passes of 512 tokens "
    "4 x h100, 79.1 GiB each, 8 to a node: pipeline 2 x replicate 1 x shard 2 x expert 1 x sequence 1 x context 1 x "
    "tensor 1, stage 3 "
    "a pass of a data rank: 4 x 64 tokens (32 response); 3 passes, 24 sequences to an update "
    "memory of a rank, GiB, at the peak of each stage "
    "at rest log-probs update critic update actor "
    "actor's parameters 10.0 10.0 10.0 10.0 "
    "activations 1.00 3.00 2.00 "
    "together 10.0 11.0 13.0 12.0 "
)
REST = (
    "a rank sends, GiB log-probs update critic update actor "
    "pipeline (inside nodes, 450 GB/s) 3.00 9.00 6.00 "
    "shard (inside nodes, 450 GB/s) 2.00 6.00 4.00 "
    "together 5.00 15.0 10.0 "
    f"estimated: 69 s for a step without the rollout, 6 tokens/s on each GPU, MFU of the updates {MFU_OF_UPDATES} "
    "the pipeline's first rank is planned, which holds more; the actor's update has a bubble of 33%, and the rank "
    "with most work 1.25 of the mean "
    "seconds log-probs update critic update actor "
    "computing 10 30 20 "
    "of that for launches 2 6 4 "
    "waiting for ranks and host 1 3 2 "
    "waiting for other stages 0.5 1.5 1 "
    "sent while computing 3 9 6 "
    "PFLOPs a rank needs 6 9 6 "
    f"MFU {MFU_OF_LOG_PROBS} {MFU} {MFU} "
    f"{text.LAUNCHES} {text.GRAPHS.format(stages='update actor')} "
)
OF_ROLLOUT = (
    "rollout by vLLM: each of 3 engines on 2 GPUs each has 24 rows, of which 12 decode together "
    "memory of a GPU that samples, GiB rollout engine's weights 5.00 keys and values 7.00 together 12.0 "
    "1.50 GiB of it stay beside updates "
    "estimated: prompts 0.25 s, responses 11.5 s; weights: a rank sends others 2.00 GiB and an engine is sent 3.00 GiB "
    f"(0.75 s). {text.ROLLOUT} "
)
OF_HOST = (
    "host memory of a rank's process, GiB at rest starting saving "
    "the process itself 4.00 4.00 4.00 weights that are read 6.00 copies for the checkpoint 8.00 "
    f"together 4.00 10.0 12.0 {text.HOST}"
)


def test_a_plan_in_words():
    fits = "It fits: 14.5 of 79.1 GiB (18%), in update critic. "
    assert words(text.of_plan(PLAN, None)) == f"{HEAD}{fits}{REST}{OF_ROLLOUT}{OF_HOST} {text.MEMORY} {text.JUDGE}"
    big = attrs.evolve(ROLLOUT, memory={"keys and values": 20 * GIB}, stays=0.0)
    said = words(text.of_plan(attrs.evolve(PLAN, rollout=big), None))
    assert "It fits: 20.0 of 79.1 GiB (25%), in the rollout. " in said
    plain = attrs.evolve(PLAN, rollout=None, host=None, case=attrs.evolve(CASE, sampling=None, pipeline_rank=1))
    found = words(text.of_plan(plain, None))
    assert "the pipeline's last rank is planned" in found
    assert found.endswith(f"{text.MEMORY} {text.NO_ROLLOUT}")
    assert "It fits: 13.0 of 79.1 GiB" in found
    pool = attrs.evolve(plain, case=attrs.evolve(plain.case, only=("actor",)))
    assert words(text.of_plan(pool, None)).endswith(f"{text.MEMORY} {text.JUDGE}")
    several = attrs.evolve(PLAN, case=attrs.evolve(CASE, sampling=PlannedSampling(engine="vllm", sequences=96, n=2)))
    assert "estimated: 69 s for 24 of the 96 sequences of a step, without the rollout, 6" in words(
        text.of_plan(several, None)
    )
    on_cpu = attrs.evolve(plain, case=attrs.evolve(plain.case, hardware=hardware_of("cpu")))
    assert f"{text.MEMORY}{text.HEAP}" in words(text.of_plan(on_cpu, None))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"checkpoint_layers": True, "offload": "all", "offload_activations": False},
            "layers recomputed, state on the host",
        ),
        ({"checkpoint_layers": False, "offload": "none", "offload_activations": False}, "float32 state critic:"),
        (
            {"compute_dtype": None, "offload": "none", "offload_activations": False},
            "float32 passes on float32 state, layers",
        ),
        ({"lora": Lora(8, 1.0), "lora_base": None}, "adapters of rank 8 on a frozen base in bfloat16"),
        ({"lora": Lora(8, 1.0), "lora_base": "nf4"}, "adapters of rank 8 on a frozen base in nf4 and bfloat16"),
        ({"virtual_stages": 2}, "stage 3, 2 stages on each rank"),
        ({"mlp_slice_tokens": 4096}, "activations on the host, MLPs in slices of 4,096 tokens"),
        ({"mesh": {}}, "1 x h100, 79.1 GiB each: pipeline 1"),
        ({"mesh": {**CASE.mesh, "expert": 2}, "load": 1.5}, "experts: the planned rank's have 1.50 times the mean"),
        (
            {"roles": {"critic": Role(checkpoint_layers=False, offload="moments")}},
            "critic: layers kept, moments on the host",
        ),
    ],
)
def test_the_head_of_a_plan_says_what_its_case_is(changes, line):
    assert line in words(text.of_plan(attrs.evolve(PLAN, case=attrs.evolve(CASE, **changes)), None))


def test_rows_that_share_prompts_are_said_in_tokens():
    what = case(tokens=256, length=64, response=0.25, micro_batches=4, together=2.0, forward_together=8.0, budget=160)
    line = (
        "prompts are computed once: 160 tokens (62%) of a pass of the update, "
        "144 tokens (38%) of one without a gradient"
    )
    shown = [words(text.of_plan(attrs.evolve(PLAN, case=each), None)) for each in (what, case())]
    assert (line in shown[0], "prompts are computed once" in shown[1]) == (True, False)


def test_what_does_not_fit_in_words():
    beside = "It does not fit: update critic needs 14.5 GiB, with the 1.5 GiB that vLLM keeps, and there are 12.0. "
    most = "Most of it: actor's parameters 10.0 and activations 3.0."
    assert beside + most in words(text.of_plan(SMALL, None))
    none = "None of the settings that were tried makes it fit, alone or together, on up to 64 times as many GPUs."
    assert f"{beside}{most} {none}" in words(text.of_plan(SMALL, []))
    remedy = Remedy({"mesh.stage": 2}, attrs.evolve(PLAN, stages=STAGES[:1]))
    table = "What would make it fit, by GPU time for a token: time GiB --mesh.stage 2 0.17x 11.0"
    assert f"{beside}{most} {table}" in words(text.of_plan(SMALL, [remedy]))
    read = text.numbers_of_plan(SMALL, [remedy])
    (helps,) = read["remedies"]
    assert helps == {"flags": {"mesh.stage": 2}, "total": 11 * GIB, "relative_cost": pytest.approx(11.5 / 69)}
    assert (
        read["fits"],
        text.numbers_of_plan(SMALL, None)["remedies"],
        text.numbers_of_plan(SMALL, [])["remedies"],
    ) == (
        *(False, None),
        [],
    )


def test_a_plan_as_json_values():
    read = text.numbers_of_plan(PLAN, None)
    names = ("estimate", "parameters", "rest", "imbalance", "needs", "fits", "seconds", "tokens", "peak_stage")
    assert {name: read[name] for name in names} == {
        "estimate": True,
        "parameters": {"actor": 1_500_000_000, "critic": 2_250_000_000},
        "rest": {"actor's parameters": 10 * GIB},
        "imbalance": 1.25,
        "needs": 14.5 * GIB,
        "fits": True,
        "seconds": 69.0,
        "tokens": 1536,
        "peak_stage": "update critic",
    }
    updates = 3e15 / (11.5 * GPU.flops)
    expected = {"update critic": updates, "update actor": updates, "step": 21e15 / (69.0 * GPU.flops)}
    assert read["mfu"] == pytest.approx({**expected, "log-probs": 2 * updates})
    assert [stage["name"] for stage in read["stages"]] == ["log-probs", "update critic", "update actor"]
    last = read["stages"][-1]
    assert (last["total"], last["recorded"], last["seconds"]["total"]) == (12 * GIB, True, 23.0)
    assert last["wire"]["shard"] == {"sent": 4 * GIB, "calls": 9.0, "seconds": 0.5}
    assert read["case"]["compute_dtype"] == "bfloat16"
    assert read["case"]["config"] == "qwen2"
    assert read["rollout"]["seconds"] == 0.25 + 11.5 + 0.75
    assert read["host"]["needs"] == 12 * GIB


def test_engines_of_a_pool_in_words():
    found = words(text.of_engines(Engines(CASE, ROLLOUT, HOST)))
    fits = "It fits: 12.0 of 79.1 GiB. The controller sends the policy after each update: to 3 engines 9.0 GiB. "
    assert found == f"{OF_ROLLOUT}{fits}{OF_HOST}"
    small = words(
        text.of_engines(Engines(attrs.evolve(CASE, hardware=attrs.evolve(GPU, memory=11 * GIB)), ROLLOUT, HOST))
    )
    assert "It does not fit: 12.0 of 11.0 GiB." in small
    alone = attrs.evolve(ROLLOUT, engines=1, gpus=1, stays=0.0, gathered=0.0, sent=0.0, sending=0.0)
    embedded = attrs.evolve(CASE, sampling=PlannedSampling())
    found = words(text.of_engines(Engines(embedded, alone, HOST)))
    assert found.startswith("rollout by the embedded engine: the engine has 24 rows, of which 12 decode together")
    assert "stay beside" not in found
    assert "weights: the engine has those that are trained. " in found


def test_columns_of_a_pool_in_words():
    calls = [
        ColumnCall("actor", "old_log_prob", {"tokens": 3 << 20, "masks": 1 << 19}, {"log_probs": 1 << 20}),
        ColumnCall("actor", "update_actor", {"tokens": 300 << 20}, {}),
    ]
    sent = (
        "columns of a step's batch to this pool, MiB old_log_prob update_actor tokens 3 300 masks 0.5 together 3.5 300"
    )
    back = "and from it old_log_prob log_probs 1 together 1"
    assert words(text.of_columns(calls)) == f"{sent} {back} {text.COLUMNS}"
    assert words(text.of_columns(calls[1:])).endswith(f"tokens 300 together 300 {text.COLUMNS}")
    assert text.of_columns([]) == []


def test_meshes_that_were_found_in_words_and_as_json_values():
    def candidate(seconds, memory):
        return Candidate(CASE, Rough(seconds, memory * GIB))

    mesh = "--mesh.shard 2 --mesh.pipeline 2"
    found = SearchResult(
        ((candidate(2.0, 5), PLAN),),
        ((candidate(2.5, 6), SMALL),),
        (candidate(3.0, 7), candidate(4.0, 8)),
        (candidate(9.0, 90), candidate(8.0, 100)),
        {"no": 1500},
    )
    best = f"planned, and fit: step s tokens/s each MFU GiB each {mesh} 69 6 {MFU_OF_UPDATES} 13.0"
    others = (
        f"1 needs 14.5 of 12.0 GiB, planned: {mesh} "
        f"2 too large for 79.1 GiB by the formula; the smallest takes 90.0: {mesh} "
        f"2 slower by the formula, not planned; the next takes 1.50 times the best one's time: {mesh} "
        "1,500 impossible: no"
    )
    assert words(text.of_search(found)) == f"1,506 meshes {best} the others: {others} {text.ROUGH}"
    none = words(text.of_search(attrs.evolve(found, best=())))
    assert "None of those that were planned fits. the others:" in none
    assert "the next takes 3 s:" in none
    assert text.of_search(SearchResult((), (), (), (), {})) == [["there is no mesh of so many GPUs"]]
    read = text.numbers_of_search(found)
    rough = {"mesh": CASE.mesh, "virtual_stages": 1}
    assert read["meshes"] == 1506
    assert read["best"] == [
        {**rough, "rough": Rough(2.0, 5 * GIB), "needs": 14.5 * GIB, "seconds": 69.0, "mfu": PLAN.mfu()}
    ]
    assert read["failed"] == [{**rough, "rough": Rough(2.5, 6 * GIB), "needs": 14.5 * GIB}]
    assert [x["rough"].seconds for x in read["slower"]] == [3.0, 4.0]
    assert [x["rough"].seconds for x in read["too_large"]] == [9.0, 8.0]
    assert read["impossible"] == {"no": 1500}


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0"),
        (5e5, "<0.001"),
        (2 << 20, "0.002"),
        (0.25 * GIB, "0.25"),
        (9.5 * GIB, "9.50"),
        (12.5 * GIB, "12.5"),
        (1234 * GIB, "1,234"),
    ],
)
def test_bytes_are_said_as_gib(size, said):
    assert text.gib(size) == said


def test_lines_are_wrapped_and_tables_aligned():
    table = text.Table("title", ["one", "two"], [("a", ["1", "22222"]), ("longer", ["", "3"])], ["4", "5"])
    assert text.rendered([["word " * 9, "  in " + "word " * 8], [table], []], width=22) == (
        "word word word word\nword word word word\nword\n"
        "  in word word word\n    word word word\n    word word\n\n"
        "title\n"
        "            one    two\n"
        "  a           1  22222\n"
        "  longer             3\n"
        "  --------------------\n"
        "  together    4      5"
    )
