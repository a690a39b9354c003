"""A model as a pure function of its parameters.

In: a Hugging Face directory or config, and parameters by transformers' names. Out: a `Model` without parameters, a
mapping of parameters, and forward passes over packed rows on chosen kernels. A probe at load compares them with
transformers.
Begin with `load.load` and `run.forward`; `place` cuts a model over a mesh, `lora` adapts it.
"""

from fppo.models.adapted import Lora
from fppo.models.bases import quantise
from fppo.models.experts import Dispatched, dispatched
from fppo.models.heads import Head, hidden_width, output_head
from fppo.models.init import as_critic, init_params
from fppo.models.inner import has_place
from fppo.models.lengths import longest_row
from fppo.models.load import load
from fppo.models.lora import adapt, merged
from fppo.models.model import Model, attention_needs, build, packed_attention, padded_attention
from fppo.models.place import (
    Narrowed,
    Prepared,
    check_dispatched,
    check_placed,
    check_staged,
    narrowed,
    own_params,
    place,
    prepare,
    tensor_axis,
    tensor_parts,
    whole_params,
)
from fppo.models.probe import check_model
from fppo.models.run import Bound, bind, call_layer, forward, hidden_states, in_compute_dtype
from fppo.models.save import save, save_config
from fppo.models.several import Adapter
from fppo.models.spans import stage_of, staged
from fppo.models.states import check_rows_whole
from fppo.runtime.exports import check_replaceable

__all__ = [
    "Adapter",
    "Bound",
    "Dispatched",
    "Head",
    "Lora",
    "Model",
    "Narrowed",
    "Prepared",
    "adapt",
    "as_critic",
    "attention_needs",
    "bind",
    "build",
    "call_layer",
    "check_dispatched",
    "check_model",
    "check_placed",
    "check_replaceable",
    "check_rows_whole",
    "check_staged",
    "dispatched",
    "forward",
    "has_place",
    "hidden_states",
    "hidden_width",
    "in_compute_dtype",
    "init_params",
    "load",
    "longest_row",
    "merged",
    "narrowed",
    "output_head",
    "own_params",
    "packed_attention",
    "padded_attention",
    "place",
    "prepare",
    "quantise",
    "save",
    "save_config",
    "stage_of",
    "staged",
    "tensor_axis",
    "tensor_parts",
    "whole_params",
]
