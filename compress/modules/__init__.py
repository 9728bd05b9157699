"""Utilities on `nn.Module`s: traversal, copies that share parameters, example inputs, and compact forms.

A compact form is a subclass of an attention or norm module that computes the same function at any width.
"""

from .compact_forms import (
    FormUse,
    compact_form_of,
    dense_class_name,
    form_use,
    register_compact_form,
    register_form_provider,
    use_compact_form_,
    use_compact_forms_,
)
from .example_inputs import CallInputs, as_call_inputs, first_examples, has_no_images, prepare_example_input
from .forms import attend, attend_with_scores, join_heads, split_heads, split_qkv
from .nested_tensors import tensors_in
from .parameter_writes import ParameterGuard, guarded_parameters, has_written_parameters
from .plain_layers import CONVOLUTIONS, ForwardCheck, is_plain_layer
from .shared_copies import make_teacher, set_eval_flags_, shared_copy, trainable_copy
from .training_mode import module_mode
from .traversal import TensorEntry, enclosing_modules, modules_of, scripted_modules, tensor_entries, tensors_of
from .unwrap import unwrap_model

__all__ = [
    "CONVOLUTIONS",
    "CallInputs",
    "FormUse",
    "ForwardCheck",
    "ParameterGuard",
    "TensorEntry",
    "as_call_inputs",
    "attend",
    "attend_with_scores",
    "compact_form_of",
    "dense_class_name",
    "enclosing_modules",
    "first_examples",
    "form_use",
    "guarded_parameters",
    "has_no_images",
    "has_written_parameters",
    "is_plain_layer",
    "join_heads",
    "make_teacher",
    "module_mode",
    "modules_of",
    "prepare_example_input",
    "register_compact_form",
    "register_form_provider",
    "scripted_modules",
    "set_eval_flags_",
    "shared_copy",
    "split_heads",
    "split_qkv",
    "tensor_entries",
    "tensors_in",
    "tensors_of",
    "trainable_copy",
    "unwrap_model",
    "use_compact_form_",
    "use_compact_forms_",
]
