"""The teacher of a run, as its settings name it: loaded where it runs, or the policy; its prompts and checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fppo import data
from fppo.assembly.inputs import Inputs, made_on
from fppo.assembly.parts import forward_micro_batching_of, load_teacher, offload_of, on_device
from fppo.assembly.roles import fetch_of, top_of
from fppo.assembly.texts import chat_options, config_place, has_tokenizer, open_tokenizer
from fppo.data.tokenizers import encode_text
from fppo.fields import module_function, only
from fppo.fleet import AnyGroup, Here, LocalGroup, on
from fppo.key import Key
from fppo.models import lora, lora_files
from fppo.models.model import Model, Params
from fppo.pipeline.feedback import Prompt, PromptByFeedback, TeacherPrompt
from fppo.pipeline.passes import PolicyFn, PolicyPass, View
from fppo.pipeline.program import AnnotateStage
from fppo.pipeline.teacher import LOG_PROBS, TOP, TeachByPolicy, TeacherFn, TeacherPass, as_drawn
from fppo.pipeline.teachers import SeveralTeachers, Weigh, by_field, by_function, by_weights
from fppo.rollout.endpoint import EndpointTeacher
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import Lane, to_host
from fppo.settings.model import ModelSettings, is_adapter, is_endpoint, params_on_host
from fppo.settings.train import DataSettings
from fppo.steps.critic import as_it_is
from fppo.steps.outputs import Forward
from fppo.workers.imports import imported


def teacher_on(group: AnyGroup, here: Here, inputs: Inputs) -> TeacherFn:
    """The teacher on the ranks of a group, or `here` for the group of this process."""
    make = make_teachers if inputs.settings.model.teachers else make_teacher
    made = made_on(group, here, make, inputs, label="make teacher")
    return made if isinstance(group, LocalGroup) else on(group, made, label="teacher")


def make_teacher(here: Here, inputs: Inputs) -> TeacherPass:
    """Make the teacher on a rank, which shares a batch's rows with the other ranks of its mesh. It reads prompts of its
    own where rows have them."""
    section = inputs.settings.model
    return _pass_of(load_teacher(section, here.mesh, (section.teacher_path or "", "model.teacher_path")), here, inputs)


def make_teachers(here: Here, inputs: Inputs) -> SeveralTeachers:
    """Make all of several teachers on a rank; those that are adapters share one base. Raises ValueError for a function
    that does not import, and for files that hold no adapter of the policy's base."""
    section, made = inputs.settings.model, dict[str, TeacherFn]()
    base: tuple[Model, Params] | None = None
    for name, path in section.teachers.items():
        place = path, f"model.teachers.{name}"
        if is_endpoint(path):
            url, _, served = path.partition("#")
            made[name] = EndpointTeacher(url=url.rstrip("/"), model=served, view=view_of_teacher(inputs.settings.data))
            continue
        if not is_adapter(path):
            made[name] = _pass_of(load_teacher(section, here.mesh, place), here, inputs)
            continue
        if base is None:
            model, params = load_teacher(section, here.mesh, (section.path, "model.path"))
            base = model, on_device(params, here.device)
        made[name] = _pass_of(_adapted(base, place, here.mesh), here, inputs)
    return SeveralTeachers(teachers=made, weigh=_weigh(section))


def _adapted(base: tuple[Model, Params], place: tuple[str, str], mesh: Mesh) -> tuple[Model, Params]:
    """A teacher whose adapter, in the files at this place, stands on a base that others share."""
    path, name = Path(place[0]), place[1]
    try:
        model, adapter = lora.adapt(*base, lora_files.read_config(path), key=Key(0), mesh=mesh)
        return model, lora_files.load(model, path, mesh=mesh, like=adapter)
    except ValueError as error:
        raise ValueError(f"{name} = {place[0]!r}: {error}") from error


def _weigh(section: ModelSettings) -> Weigh:
    by, weights = section.teacher_by, section.teacher_weights
    if by is None:
        return by_weights(weights or dict.fromkeys(section.teachers, 1 / len(section.teachers)))
    return by_field(by) if module_function(by) is not None else by_function(imported(by, "model.teacher_by"))


def _pass_of(loaded: tuple[Model, Params], here: Here, inputs: Inputs) -> TeacherPass:
    """The pass of a loaded teacher."""
    settings, section, (model, params) = inputs.settings, inputs.settings.model, loaded
    params, offload = on_device(params, here.device), offload_of(section.offload, section.teacher_offload)
    how = only(section, "remove_padding", "share_prompts")
    forward = Forward(model, inputs.kernels, here.mesh, top=top_of(settings.actor.distill, section), **how)
    micro_batching, fetch = forward_micro_batching_of(section, settings.actor), fetch_of(offload, Lane(here.device))
    return TeacherPass(
        params=to_host(params) if params_on_host(offload) else params,
        policy=PolicyPass(forward=forward, micro_batching=micro_batching, fetch=fetch),
        view=view_of_teacher(settings.data),
        outputs=TOP if settings.actor.distill.used else LOG_PROBS,
    )


def view_of_teacher(section: DataSettings) -> View:
    """The function from rows to those that a teacher reads."""
    return as_it_is if section.teacher_prompt is None else data.with_teacher_prompt


def prompt_of_teacher(section: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """How a teacher's prompts are made after scoring. Raises ValueError for a function that does not import."""
    if section.teacher_function is None:
        return as_drawn
    fn, options = imported(section.teacher_function, "data.teacher_prompt"), chat_options(section)

    def encode(prompt: TeacherPrompt) -> list[int]:
        if not section.chat and not isinstance(prompt, str):
            raise ValueError("messages need data.chat = true" if isinstance(prompt, list) else f"got {prompt!r:.100}")
        if not section.chat:
            return encode_text(tokenizer, str(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return data.encode_chat(tokenizer, messages, options=options, sampled=True)

    return PromptByFeedback(fn=fn, encode=encode, tokenizer=tokenizer, limit=section.teacher_prompt_tokens)


def by_policy(
    stage: AnnotateStage, policy: PolicyFn, section: DataSettings, tokenizer: PreTrainedTokenizerBase, *, top: bool
) -> TeachByPolicy:
    """The stage, with the policy as its own teacher; `policy` is the policy's pass. With `top` the teacher gives its
    distributions."""
    prompt, outputs = prompt_of_teacher(section, tokenizer), TOP if top else LOG_PROBS
    return TeachByPolicy(stage=stage, policy=policy, prompt=prompt, view=view_of_teacher(section), outputs=outputs)


def check_adapter(section: ModelSettings, tokenizer: PreTrainedTokenizerBase, place: tuple[str, str]) -> None:
    """Raises ValueError for a teacher's adapter at this place with another tokenizer beside it than the policy's."""
    if has_tokenizer(Path(place[0])):
        own = open_tokenizer(*place, section.trust_remote_code)
        if (apart := _difference(own, tokenizer)) is not None:
            raise ValueError(f"{place[1]} = {place[0]!r}: its tokenizer is not the policy's: {apart}; give one that is")


def check_teacher(
    section: ModelSettings, tokenizer: PreTrainedTokenizerBase, configs: Mapping[str, Any], place: tuple[str, str]
) -> None:
    """Raises ValueError for a teacher that cannot read the policy's tokens: it has another tokenizer, or a vocabulary
    that cannot be compared.

    `configs` are the models' by role, `place` the teacher's path and the setting that gives it. Added tokens may
    differ, as those of a base model and a chat model do. Embeddings may be padded to another size if the teacher's own
    tokenizer shows the vocabularies to be equal. A teacher needs at least as many rows of embeddings as the policy,
    which may sample the token of any row.
    """
    path, name = place
    ours = ("model.path", section.path) if section.tokenizer is None else ("model.tokenizer", section.tokenizer)
    rows = {role: data.vocabulary_size(configs[role]) for role in ("actor", "teacher")}
    directory, wrong = config_place(path, name), None
    if has_tokenizer(directory):
        own = open_tokenizer(str(directory), name, section.trust_remote_code)
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
            f"{name} = {path!r}: {wrong}; a teacher reads the policy's own tokens: give one of the same "
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
