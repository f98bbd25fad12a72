"""The private torch interfaces that rota uses, one test each: a failure here names the interface
that a new torch has changed, and rota/_torch.py says what breaks without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

import rota
from rota import _torch

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=77)


@pytest.fixture(params=["rota"])
def world(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group(request.param, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_backend_of_group(world: dist.ProcessGroup) -> None:
    assert _torch.backend_of(world, CPU).name() == "rota", "ProcessGroup._get_backend"
    with pytest.raises(RuntimeError):
        _torch.backend_of(world, torch.device("meta"))


def test_devices_of_group(world: dist.ProcessGroup) -> None:
    assert CPU in _torch.devices_of(world), "ProcessGroup._device_types"


@pytest.mark.parametrize("world", ["rota", "gloo"], indirect=True)
def test_timeout_of_backend(world: dist.ProcessGroup) -> None:
    assert _torch.timeout_of(_torch.backend_of(world, CPU)) == TIMEOUT, "Backend.options._timeout"


def test_timeout_of_options_can_be_set() -> None:
    _torch.set_timeout(options := rota.BackendOptions(), TIMEOUT)
    assert options._timeout == TIMEOUT, "Backend.Options._timeout"


def test_wrapper_of_checked_group_is_unwrapped() -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrapper = _torch.backend_of(dist.group.WORLD, CPU)
        inside = _torch.unwrapped(wrapper)
        assert inside is not wrapper and inside.name() == "gloo", "ProcessGroupWrapper.wrapped_pg"
        assert _torch.unwrapped(inside) is inside
    finally:
        dist.set_debug_level(level)
        dist.destroy_process_group()


def test_what_torch_passes_to_the_maker_of_a_backend() -> None:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    options = _DistributedBackendOptions()
    for name in ("store", "group_rank", "group_size", "global_ranks_in_group", "timeout"):
        assert hasattr(options, name), f"_DistributedBackendOptions.{name}"


def test_groups_are_listed_and_named_anew(world: dist.ProcessGroup) -> None:
    name = (group := dist.new_group([0])).group_name
    assert _torch.all_groups() == [world, group], "distributed_c10d._world.pg_map"
    dist.destroy_process_group(group)
    dist.destroy_process_group(world)
    _torch.restart_group_names()
    dist.init_process_group("rota", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.new_group([0]).group_name == name, "distributed_c10d._world.group_count"


def test_coalescing_block(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[_torch.CoalescingBlock | None] = []
    coalescing_block = _torch.coalescing_block

    def watched(frame: object) -> _torch.CoalescingBlock | None:
        blocks.append(coalescing_block(frame))
        return blocks[-1]

    monkeypatch.setattr(_torch, "coalescing_block", watched)
    sent, received = torch.ones(2), torch.zeros(2)
    messages = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    (block,) = blocks
    assert block is not None, "contextlib's frames around distributed_c10d._coalescing_manager"
    assert block.messages == messages, "the local p2p_op_list of batch_isend_irecv"
    assert received.tolist() == [1.0, 1.0]

    with pytest.raises(KeyError), dist.distributed_c10d._coalescing_manager(world, CPU):
        raise KeyError
    blocks[-1].forget()
    assert not dist.distributed_c10d._world.pg_coalesce_state, "_world.pg_coalesce_state"


def test_version_of_tensor_grows_with_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.add_(1)
    assert _torch.version_of(tensor) > before, "Tensor._version"


def test_backward_pass_has_a_number_nodes_and_final_callbacks() -> None:
    leaf, ran = torch.zeros(2, requires_grad=True), []

    def on_gradient(gradient: torch.Tensor) -> None:
        ran.append(_torch.is_inside_node())
        ran.append(_torch.graph_task() >= 0)
        _torch.after_backward(lambda: _torch.after_backward(lambda: ran.append("end")))

    leaf.register_hook(on_gradient)
    assert _torch.graph_task() == -1, "torch._C._current_graph_task_id"
    leaf.sum().backward()
    assert ran == [True, True, "end"], (
        "torch._C._current_autograd_node, torch._C._current_graph_task_id, "
        "torch.autograd.Variable._execution_engine.queue_callback"
    )
    assert not _torch.is_inside_node(), "torch._C._current_autograd_node"


def test_lists_of_tensors_are_multiplied_and_copied() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    _torch.multiply(tensors, 3.0)
    assert all(tensor.eq(3).all() for tensor in tensors), "torch._foreach_mul_"
    _torch.copy_each(tensors, [torch.zeros(2), torch.zeros(3)])
    assert all(tensor.eq(0).all() for tensor in tensors), "torch._foreach_copy_"


def test_storage_has_one_number() -> None:
    tensor = torch.zeros(4)
    numbers = {_torch.storage_id(t.untyped_storage()) for t in (tensor, tensor[2:])}
    assert len(numbers) == 1, "UntypedStorage._cdata"
    assert _torch.storage_id(torch.zeros(4).untyped_storage()) not in numbers


def test_tree_is_mapped() -> None:
    assert _torch.tree_map(str, {"a": [1, (2, None)]}) == {"a": ["1", ("2", "None")]}, (
        "torch.utils._pytree.tree_map"
    )


def test_buffers_of_module_are_its_own() -> None:
    module = torch.nn.BatchNorm1d(2)
    _torch.buffers_of(module)["running_mean"] = mean = torch.ones(2)
    assert module.get_buffer("running_mean") is mean, "Module._buffers"


def test_batch_norms_are_known() -> None:
    norms = torch.nn.BatchNorm2d(2), torch.nn.SyncBatchNorm(2)
    assert all(map(_torch.is_batch_norm, norms)), "torch.nn.modules.batchnorm._BatchNorm"
    assert not _torch.is_batch_norm(torch.nn.LayerNorm(2))


def test_constant_function_is_marked_as_torch_marks_it() -> None:
    def own() -> None: ...
    def given_to_torch() -> None: ...

    _torch.assume_constant(own)
    torch.compiler.assume_constant_result(given_to_torch)
    assert vars(own) == vars(given_to_torch), "function._dynamo_marked_constant"


def scaled(**options: bool) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    parameter = torch.ones(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    return scaler, torch.optim.SGD([parameter], lr=1.0, **options)


def test_unscaling_can_be_overridden_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaler(torch.amp.GradScaler):
        pass

    def unscale(scaler: Scaler, *args: object) -> object:
        calls.append("own")
        return _torch.unscale(scaler, *args)

    calls: list[object] = []
    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", _torch_unscaling)
    _torch.after_unscaling(calls.append)
    _torch.override_unscaling(Scaler, unscale)
    _, optimizer = scaled()
    scaler = Scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes the scale
    scaler.unscale_(optimizer)
    assert calls == ["own", optimizer], "GradScaler._unscale_grads_"
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter.grad.tolist() == [1.0, 1.0]


_torch_unscaling = torch.amp.GradScaler._unscale_grads_


def test_scaler_keeps_what_it_found_until_update() -> None:
    scaler, optimizer = scaled()
    noted = _torch.unscaled_by(scaler)
    assert noted[id(optimizer)]["stage"] is OptState.READY, "GradScaler._per_optimizer_states"
    scaler.unscale_(optimizer)
    assert noted[id(optimizer)]["stage"] is not OptState.READY, "torch.amp.grad_scaler.OptState"
    (found,) = noted[id(optimizer)]["found_inf_per_device"].values()
    assert not found, "GradScaler._per_optimizer_states[...]['found_inf_per_device']"
    noted.clear()
    scaler.unscale_(optimizer)  # not twice in its eyes
    noted[id("a model")]["found_inf_per_device"] = {CPU: torch.ones(())}
    scaler.update()
    assert scaler.get_scale() == 2.0, "GradScaler._per_optimizer_states, as update() reads it"


def test_fused_step_divides_by_grad_scale() -> None:
    _, optimizer = scaled(fused=True)
    assert _torch.takes_grad_scale(optimizer), "Optimizer._step_supports_amp_scaling"
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.step()
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter.tolist() == [0.5, 0.5], "the attribute grad_scale of fused optimizers"


def test_groups_of_fsdp_module(world: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
    groups = list(_torch.fsdp_groups(module))
    assert groups, "FSDPModule._get_fsdp_state, and its mesh_info"
    assert all(group.size() == 1 and device.type == "cpu" for group, device in groups)


def test_fsdp_calls_what_rota_has() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    for name in ("AllGather", "ReduceScatter"):
        theirs, own = getattr(_fsdp_api, name), getattr(rota.fsdp, name)
        missing = theirs.__abstractmethods__ - vars(own).keys() - vars(own.__base__).keys()
        assert not missing, f"torch.distributed.fsdp._fully_shard._fsdp_api.{name}"


def test_shard_of_dtensor(world: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    dtensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    assert _torch.local_shape_and_offset(dtensor) == ((4, 2), (0, 0)), (
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
    )


# ---- no other file of the package reaches inside torch

PACKAGE = Path(rota.__file__).parent
OF_PYTHON = {"_exit", "_getframe"}  # which its documents describe


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.AST, of: type[ast.expr_context]) -> set[str]:
    """The names of attributes that a file reads or writes, and of what it defines."""
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and type(n.ctx) is of}
    if of is ast.Store:
        definitions = (ast.FunctionDef, ast.ClassDef)
        found |= {n.name for n in ast.walk(tree) if isinstance(n, definitions)}
        found |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is of}
    return set(filter(is_private, found))


def insides_reached(source: str, own: set[str], known: set[str]) -> list[str]:
    """What of torch's insides a file reaches.

    Args:
        own: private names that the package defines.
        known: those of torch, which only an object's own class may have, too.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [prefix + alias.name for alias in node.names]
            found += [name for name in names if name.startswith("torch") and is_private(name)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_own = node.attr in own | OF_PYTHON and (of_self or node.attr not in known)
            found += [] if is_own else [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [n.value for n in node.args[1:2] if isinstance(n, ast.Constant)]
            found += [name for name in names if is_private(name) and name not in own]
    return found


def test_no_other_file_reaches_inside_torch() -> None:
    paths = [*PACKAGE.rglob("*.py"), PACKAGE.parent / "rota_autoload.py"]
    sources = {path: path.read_text() for path in paths}
    known = private_names(ast.parse(sources.pop(PACKAGE / "_torch.py")), ast.Load)
    trees = map(ast.parse, sources.values())
    own = set[str]().union(*(private_names(tree, ast.Store) for tree in trees))
    reached = {
        str(path): found
        for path, source in sources.items()
        if (found := insides_reached(source, own, known))
    }
    assert reached == {}, "put it into rota/_torch.py, with a test here"


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree",
        "from torch._C._distributed_c10d import Work",
        "import torch._dynamo",
        "torch._foreach_add_(a, b)",
        "options._timeout = 3",
        "self._enabled",
        "getattr(optimizer, '_hooks')",
        "torch._C._current_graph_task_id()",
    ],
)
def test_insides_are_found(source: str) -> None:
    assert insides_reached(source, {"_timeout"}, {"_timeout"})


def test_own_names_are_no_insides() -> None:
    source = "self._timeout\nother._names\nfrom rota import _C, _torch\nos._exit(1)"
    assert insides_reached(source, {"_timeout", "_names"}, {"_timeout"}) == []
