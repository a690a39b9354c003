"""The teacher of a run, as its settings name it: loaded where it runs, and checked against the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from fppo import data
from fppo.assembly.inputs import Inputs, made_on
from fppo.assembly.parts import forward_micro_batching_of, load_teacher, offload_of, on_device
from fppo.assembly.roles import fetch_of
from fppo.assembly.texts import config_place, has_tokenizer, open_tokenizer
from fppo.fields import only
from fppo.fleet import AnyGroup, Here, LocalGroup, on
from fppo.pipeline.passes import PolicyPass
from fppo.pipeline.teacher import TeacherFn, TeacherPass
from fppo.runtime.offload import Lane, to_host
from fppo.settings.model import ModelSettings, params_on_host
from fppo.steps.critic import as_it_is
from fppo.steps.outputs import Forward


def teacher_on(group: AnyGroup, here: Here, inputs: Inputs) -> TeacherFn:
    """The teacher on the ranks of a group, or `here` for the group of this process."""
    made = made_on(group, here, make_teacher, inputs, label="make teacher")
    return made if isinstance(group, LocalGroup) else on(group, made, label="teacher")


def make_teacher(here: Here, inputs: Inputs) -> TeacherPass:
    """Make the teacher on a rank, which shares a batch's rows with the other ranks of its mesh. It reads prompts of its
    own where rows have them."""
    settings, section = inputs.settings, inputs.settings.model
    model, params = load_teacher(section, here.mesh)
    params, offload = on_device(params, here.device), offload_of(section.offload, section.teacher_offload)
    forward = Forward(model, inputs.kernels, here.mesh, **only(section, "remove_padding", "share_prompts"))
    micro_batching, fetch = forward_micro_batching_of(section, settings.actor), fetch_of(offload, Lane(here.device))
    return TeacherPass(
        params=to_host(params) if params_on_host(offload) else params,
        policy=PolicyPass(forward=forward, micro_batching=micro_batching, fetch=fetch),
        view=as_it_is if settings.data.teacher_prompt is None else data.with_teacher_prompt,
    )


def check_teacher(section: ModelSettings, tokenizer: PreTrainedTokenizerBase, configs: Mapping[str, Any]) -> None:
    """Raises ValueError for a teacher that cannot read the policy's tokens: it has another tokenizer, or a vocabulary
    that cannot be compared.

    `configs` are the models' by role. Added tokens may differ, as those of a base model and a chat model do. Embeddings
    may be padded to another size if the teacher's own tokenizer shows the vocabularies to be equal. A teacher needs at
    least as many rows of embeddings as the policy, which may sample the token of any row.
    """
    path = section.teacher_path
    assert path is not None
    ours = ("model.path", section.path) if section.tokenizer is None else ("model.tokenizer", section.tokenizer)
    rows = {role: data.vocabulary_size(configs[role]) for role in ("actor", "teacher")}
    directory, wrong = config_place(path, "model.teacher_path"), None
    if has_tokenizer(directory):
        own = open_tokenizer(str(directory), "model.teacher_path", section.trust_remote_code)
        if (apart := _difference(own, tokenizer)) is not None:
            wrong = f"its tokenizer is not that of {ours[0]} = {ours[1]!r}: {apart}"
    elif rows["teacher"] != rows["actor"]:
        sizes = f"it has {rows['teacher']:,} tokens and model.path = {section.path!r} has {rows['actor']:,}"
        wrong = f"{sizes}, and there is no tokenizer beside it that would show them to be the same"
    if wrong is None and rows["teacher"] < rows["actor"]:
        wrong = f"its embedding has {rows['teacher']:,} rows, fewer than the {rows['actor']:,} of model.path = "
        wrong += f"{section.path!r}, which may sample any of them"
    if wrong is not None:
        raise ValueError(
            f"model.teacher_path = {path!r}: {wrong}; a teacher reads the policy's own tokens: give one of the same "
            "family, or imitate its answers as texts (fppo sft)"
        )


def _difference(theirs: Any, ours: Any) -> str | None:
    """How many tokens, apart from added ones, have other ids in the other tokenizer, with an example; None if equal."""
    known = theirs.get_vocab(), ours.get_vocab()
    plain = {*known[0]} - {*theirs.get_added_vocab()} | {*known[1]} - {*ours.get_added_vocab()}
    apart = sorted((ids for text in plain if (ids := _ids(text, *known))[1] != ids[2]), key=lambda ids: (ids[1:], ids))
    if not apart:
        return None
    text, there, here = apart[0]
    return f"{len(apart):,} tokens differ, as {text!r}, which is {_number(there)} there and {_number(here)} here"


def _ids(text: str, theirs: Mapping[str, int], ours: Mapping[str, int]) -> tuple[str, int, int]:
    return text, theirs.get(text, -1), ours.get(text, -1)


def _number(token: int) -> str:
    return "none" if token < 0 else f"number {token}"
