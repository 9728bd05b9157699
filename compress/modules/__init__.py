"""Utilities on `nn.Module`s: traversal, copies that share parameters, example inputs, and compact forms.

A compact form is a subclass of an attention or norm module that computes the same function at any width.
"""

from .choice import Choice, Zero, choice_groups, choices_of, choose_, tie_shared_scores_
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
from .example_inputs import (
    CallInputs,
    as_call_inputs,
    clone_tensors,
    first_examples,
    has_no_images,
    prepare_example_input,
)
from .forms import attend, attend_with_scores, join_heads, split_heads, split_qkv
from .fresh_weights import fresh_tensors
from .hugging_face import is_hugging_face_model
from .nested_tensors import tensors_in
from .parameter_writes import ParameterGuard, guarded_parameters, has_written_parameters
from .plain_layers import CONVOLUTIONS, ForwardCheck, is_plain_layer
from .search_space import (
    Decision,
    Option,
    SearchSpace,
    Strengths,
    candidate_names,
    chosen_by_path,
    decisions_of,
)
from .selective_norms import SELECTION_INDEX, can_select, is_selective, select_channels_
from .shared_copies import make_teacher, set_eval_flags_, shared_copy, trainable_copy
from .training_mode import module_mode
from .traversal import TensorEntry, enclosing_modules, modules_of, scripted_modules, tensor_entries, tensors_of
from .unwrap import unwrap_model, unwrap_teacher

__all__ = [
    "CONVOLUTIONS",
    "SELECTION_INDEX",
    "CallInputs",
    "Choice",
    "Decision",
    "FormUse",
    "ForwardCheck",
    "Option",
    "ParameterGuard",
    "SearchSpace",
    "Strengths",
    "TensorEntry",
    "Zero",
    "as_call_inputs",
    "attend",
    "attend_with_scores",
    "can_select",
    "candidate_names",
    "choice_groups",
    "choices_of",
    "choose_",
    "chosen_by_path",
    "clone_tensors",
    "compact_form_of",
    "decisions_of",
    "dense_class_name",
    "enclosing_modules",
    "first_examples",
    "form_use",
    "fresh_tensors",
    "guarded_parameters",
    "has_no_images",
    "has_written_parameters",
    "is_hugging_face_model",
    "is_plain_layer",
    "is_selective",
    "join_heads",
    "make_teacher",
    "module_mode",
    "modules_of",
    "prepare_example_input",
    "register_compact_form",
    "register_form_provider",
    "scripted_modules",
    "select_channels_",
    "set_eval_flags_",
    "shared_copy",
    "split_heads",
    "split_qkv",
    "tensor_entries",
    "tensors_in",
    "tensors_of",
    "tie_shared_scores_",
    "trainable_copy",
    "unwrap_model",
    "unwrap_teacher",
    "use_compact_form_",
    "use_compact_forms_",
]
