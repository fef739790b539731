"""PyTorch's private names that `persample.distributed` and the graph rely on. Holds for torch 2.13 to 2.15."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed import _composable_state, _functional_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard
from torch.distributed.tensor import DTensor, _api, _redistribute
from torch.nn.parallel import distributed as ddp

from persample.distributed import shards, tensor_parallel, wrappers
from persample.graph.ops.table import named
from tests.graph.versions import TESTED, VERSION


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (
            "is_last_backward post_backward_final_callback_queued iter_forward_root all_states",
            _fsdp_state.FSDPStateContext,
        ),
        ("_training_state _state_ctx _comm_ctx _fsdp_param_group", _fsdp_state.FSDPState),
        (
            "fsdp_params reduce_grads reshard_after_backward _training_state _post_forward_indices comm_ctx "
            "is_unsharded mesh_info",
            _fsdp_param_group.FSDPParamGroup,
        ),
        ("post_forward_order", _fsdp_param_group.FSDPCommContext),
        ("sharded_param _unsharded_param", _fsdp_param.FSDPParam),
        ("unshard( reshard( _get_fsdp_state(", _fully_shard),
        ("_module_state_mapping", _composable_state),
        ("ctx.param_group post_backward", _fsdp_param_group.RegisterPostBackwardFunction),
        ("ddp_weakref static_graph _static_graph_delay_allreduce_enqueued", ddp._DDPSink),
        ("ctx.dtensor_spec ctx.grad_placements", _api._ToTorchTensor),
        ("ctx.forward_input_placements ctx.forward_input_device_mesh ctx.grad_placements", _api._FromTorchTensor),
        ("AsyncCollectiveTensor wait(", _functional_collectives.AsyncCollectiveTensor),
    ],
    ids=lambda value: getattr(value, "__name__", "names").split(".")[-1],
)
def test_names_are_there(names: str, source: object) -> None:
    text = inspect.getsource(source)  # type: ignore[arg-type]
    assert [name for name in names.split() if name not in text] == []


# Names that came later, with the tested releases that have them: what is kept of them is kept where they are.
LATER = {
    "_post_backward_pending": (_fsdp_param_group.FSDPParamGroup, {(2, 15)}),
    "manual_backward_finalization_active": (_fsdp_state.FSDPStateContext, {(2, 15)}),
    "_fsdp_param_groups": (_fsdp_state.FSDPState, {(2, 13), (2, 14), (2, 15)}),
}


@pytest.mark.skipif(VERSION not in TESTED, reason="says nothing of releases that were not tested")
@pytest.mark.parametrize("name", LATER)
def test_later_names_are_there_in_the_releases_that_have_them(name: str) -> None:
    source, releases = LATER[name]
    assert (f"self.{name}" in inspect.getsource(source)) == (VERSION in releases)


def test_later_names_are_those_that_are_kept() -> None:
    assert {*shards._LATER_IN_GROUP, *shards._LATER_IN_CONTEXT} < set(LATER)


def test_wrappers_have_the_names_by_which_their_nodes_are_known() -> None:
    for function in (_fsdp_param_group.RegisterPostBackwardFunction, ddp._DDPSink):
        assert function.__name__ in wrappers.WRAPPER_FUNCTIONS
        assert named(function.__name__).flow


def test_nodes_of_dtensors_have_the_names_by_which_they_are_known() -> None:
    for function in (_api._ToTorchTensor, _api._FromTorchTensor, _redistribute.Redistribute):
        assert function.__name__ in tensor_parallel.DTENSOR_FUNCTIONS
        assert function.__module__.startswith("torch.")
        assert named(function.__name__).flow


def test_sharded_parameters_have_a_local_tensor() -> None:
    assert "_local_tensor" in DTensor.__slots__
