"""Wraps PyTorch's private interfaces.

Whatever PyTorch does not promise to keep is used here and nowhere else, so that a new release concerns one
folder. Tested with the releases between ``OLDEST_TESTED`` and ``NEWEST_TESTED``.
"""

from olla_fx.torch_compat.cuda_graphs import captures_current_stream, capturing
from olla_fx.torch_compat.cuda_memory import with_allocator_history
from olla_fx.torch_compat.dynamo import not_compiled, run_unplanned
from olla_fx.torch_compat.fake import (
    DATA_DEPENDENT_ERRORS,
    assume_sign,
    new_fake_mode,
    quiet_fake_tensors,
)
from olla_fx.torch_compat.hooks import (
    MODULE_HOOK_TABLES,
    any_global_module_hooks,
    any_tensor_hooks,
    has_optimizer_pre_hooks,
    initialize_optimizer_state,
    module_hooks,
    note_optimizer_stepped,
    optimizer_step_function,
    run_optimizer_post_hooks,
    tensor_hooks,
)
from olla_fx.torch_compat.modules import (
    NORM_TYPE,
    children_of,
    own_tensors,
    parameters_of,
    refresh_weight_list,
    share_tables,
)
from olla_fx.torch_compat.operators import OPERATOR_TYPES, OpOverload, is_erased, overload_name, schema_of
from olla_fx.torch_compat.patches import (
    attribute_reads,
    seeding_replaced,
)
from olla_fx.torch_compat.state import (
    autocast_state,
    backward_number,
    below_autograd,
    graph_is_kept,
    is_batched,
    is_observed,
    is_recomputing,
    is_traced_by_torchscript,
    is_transformed,
    kernel_settings,
    real_random_number,
    real_tensors,
    saved_tensor_hooks_in_traces,
    saves_tensors_through_hooks,
    tracing_settings,
    without_saved_tensor_hooks,
)
from olla_fx.torch_compat.tensors import (
    UNINITIALIZED,
    TorchDispatchMode,
    direct_call,
    in_different_storages,
    pytree,
    storage_key,
    storage_keys,
    tensor_dictionary,
    tensors_fit,
    version_of,
)
from olla_fx.torch_compat.tracing import layout_in_trace, new_nodes_marked, trace_functional
from olla_fx.torch_compat.versions import (
    NEWEST_TESTED,
    OLDEST_TESTED,
    warn_if_newer_than_tested,
)

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "MODULE_HOOK_TABLES",
    "NEWEST_TESTED",
    "NORM_TYPE",
    "OLDEST_TESTED",
    "OPERATOR_TYPES",
    "UNINITIALIZED",
    "OpOverload",
    "TorchDispatchMode",
    "any_global_module_hooks",
    "any_tensor_hooks",
    "assume_sign",
    "attribute_reads",
    "autocast_state",
    "backward_number",
    "below_autograd",
    "captures_current_stream",
    "capturing",
    "children_of",
    "direct_call",
    "graph_is_kept",
    "has_optimizer_pre_hooks",
    "in_different_storages",
    "initialize_optimizer_state",
    "is_batched",
    "is_erased",
    "is_observed",
    "is_recomputing",
    "is_traced_by_torchscript",
    "is_transformed",
    "kernel_settings",
    "layout_in_trace",
    "module_hooks",
    "new_fake_mode",
    "new_nodes_marked",
    "not_compiled",
    "note_optimizer_stepped",
    "optimizer_step_function",
    "overload_name",
    "own_tensors",
    "parameters_of",
    "pytree",
    "quiet_fake_tensors",
    "real_random_number",
    "real_tensors",
    "refresh_weight_list",
    "run_optimizer_post_hooks",
    "run_unplanned",
    "saved_tensor_hooks_in_traces",
    "saves_tensors_through_hooks",
    "schema_of",
    "seeding_replaced",
    "share_tables",
    "storage_key",
    "storage_keys",
    "tensor_dictionary",
    "tensor_hooks",
    "tensors_fit",
    "trace_functional",
    "tracing_settings",
    "version_of",
    "warn_if_newer_than_tested",
    "with_allocator_history",
    "without_saved_tensor_hooks",
]
