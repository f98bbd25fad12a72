"""What a hook keeps of one model: options, and the results that a training loop reads.

`Communicator.reduce_bucket` does the work: it casts, reduces, averages, unscales, checks and
measures in one pass. hooks.py, reduction.py, amp.py and clipping.py build on the state.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rota import options
from rota.communicator import Communicator
from rota.errors import RotaError
from rota.gradients.buckets import Bucket, Entries, Entry, check_buffer
from rota.gradients.communicators import communicator_of, tell_peers_of
from rota.gradients.ddp import NamedCopies, NamedModel, SeenParameters, group_of
from rota.gradients.model_group import ModelGroup, Replicas
from rota.gradients.residuals import Residuals
from rota.gradients.results import Results
from rota.gradients.rounding import split_mix_64
from rota.gradients.sharded import Sharding
from rota.rendezvous.groups import check_group
from rota.rendezvous.joint import JointSteps
from rota.sharding import as_dtensor, shard_of_rank

# All live states: clip_grad_norm_ finds a state by the parameters that it saw.
live_states: weakref.WeakSet[HookState] = weakref.WeakSet()
# What a copy of a state has of it, beside its groups and its model.
_OPTIONS = (
    *("wire_dtype", "block_scaling", "inter_wire_dtype", "stochastic_rounding", "error_feedback"),
    *("loss_scale", "gradient_predivide_factor", "algorithm", "num_shards"),
)


class HookState:
    """Options and memory of `rota.fused_hook` and `rota.reduce_gradients`, with float16 on the wire
    by default; make one per model, with the same options on every rank.

    After a backward pass the gradients are averaged and divided by `loss_scale`, and every rank has
    the same `found_inf` and `grad_norm()` without reading a gradient again. `rota.amp.GradScaler`
    and `rota.clip_grad_norm_` use them.

    Accumulate gradients under DDP's no_sync() in all but the last backward pass of a step. If every
    pass reduces, they are averaged again each time, as with torch's hooks, and are wrong with a
    `loss_scale` other than 1 unless a rota.amp.GradScaler is in use.

    Args:
        group: the ranks to average over, on any backend, such as the process group of the model's
            DDP; None is the default group.
        engine: as in rota.Communicator; all hooks of a group share one communicator.
        wire_dtype: the dtype on the wire, one of torch.float32, bfloat16, float16, float8_e4m3fn or
            float8_e5m2; None is that of the gradients, one of these too. Sums are kept in float32.
        block_scaling: scale each block of 32 or 64 elements by its own power of two, so that none
            overflows and few underflow (E8M0 scales as in the OCP Microscaling specification 1.0);
            for float16 and float8, where None means True. Blocks follow DDP's cuts of buckets.
        inter_wire_dtype: instead of wire_dtype, where the ranks are on several hosts, with scaled
            blocks if it is float16 or float8. Only what crosses between hosts is rounded then.
        stochastic_rounding: round to one of the two neighbours at random, so that the expected
            result is exact, instead of to the nearest.
        seed: for stochastic rounding, in [0, 2**64), the same on every rank. Reduction number i of
            this state uses output i of the generator SplitMix64 (Steele, Lea & Flood 2014) that
            starts from it.
        error_feedback: add the rounding error of a gradient to the next one (Seide et al. 2014);
            needs 8 bytes per parameter. Call drop_results() if you skip a step that is finite.
        loss_scale: the factor of the loss; results are divided by it. Finite and positive; may be
            set between backward passes. A rota.amp.GradScaler sets it, and resets it to 1.
        gradient_predivide_factor: f divides gradients by f before they are summed, and the sum by
            world_size / f, as Horovod and FSDP do; for gradients that overflow a wire dtype without
            block scaling.
        algorithm: as in Communicator.all_reduce.
        num_shards: gradients are the sums of the logical shards of each rank (rota.LogicalShards),
            of which all ranks together have so many. They are added in a tree, as by
            Communicator.all_reduce(order="tree"), and averaged over the shards, not the ranks.
        model: the DistributedDataParallel that the state is for, or the module inside it; held
            weakly. Errors and state_dict() name its parameters; error feedback cannot be saved
            without it. The group defaults to that of a DistributedDataParallel.
        model_group: the ranks that together hold one copy of the model, as pipeline stages and
            tensor-parallel ranks do. grad_norm() and found_inf are then those of the whole model,
            so that rota.clip_grad_norm_ and rota.amp.GradScaler do the same on all of them. Every
            rank of model_group makes its states in the same order: that is a collective call.
            Reading the results waits for all of them; with error_feedback or stochastic_rounding,
            the next reduction does, too.
        replicas: replicas(parameter) is the number of ranks of model_group that hold the same
            parameter, such as a norm's weight that tensor-parallel ranks share. Only for plain
            tensors, where None means 1: the placements of a DTensor tell its replicas.

    Raises:
        TypeError: a group is not a process group, or wire_dtype is not one of those above.
        ValueError: an option is invalid; the text says what is valid.
        rota.TransportError: another rank of model_group has raised an error; names it.

    backward() raises if several models share one state, or if gradients cannot be reduced. Without
    `model`, a group that is not DDP's goes unnoticed, as with torch's hooks.

    Example:
        >>> state = rota.HookState(model=ddp, wire_dtype=torch.float8_e4m3fn, error_feedback=True)
        >>> ddp.register_comm_hook(state, rota.fused_hook)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype | None = torch.float16,
        *,
        engine: dist.ProcessGroup | None = None,
        block_scaling: bool | None = None,
        inter_wire_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        error_feedback: bool = False,
        loss_scale: float = 1.0,
        gradient_predivide_factor: float = 1.0,
        algorithm: str = "auto",
        num_shards: int | None = None,
        model: torch.nn.Module | None = None,
        model_group: dist.ProcessGroup | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        check_group("rota.HookState", "model_group", model_group)
        in_blocks = options.scales_blocks(wire_dtype, block_scaling)
        self._model: NamedModel | NamedCopies | None = None

        def check() -> None:
            check_group("rota.HookState", "group", group)
            check_group("rota.HookState", "engine", engine)
            if replicas is not None and not callable(replicas):
                raise TypeError(f"rota.HookState: replicas is {replicas!r}, expected a function")
            if replicas is not None and model_group is None:
                raise ValueError("rota.HookState: replicas is about model_group, which is missing")
            for name, flag in (
                ("block_scaling", in_blocks),
                ("stochastic_rounding", stochastic_rounding),
                ("error_feedback", error_feedback),
            ):
                if not isinstance(flag, bool):
                    raise TypeError(f"rota.HookState: {name} is {flag!r}, expected True or False")
            options.check_wire("rota.HookState", wire_dtype or torch.float32, in_blocks)
            if inter_wire_dtype is not None:
                between = options.scales_blocks(inter_wire_dtype)
                options.check_wire("rota.HookState", inter_wire_dtype, between, "inter_wire_dtype")
            options.check_factor("gradient_predivide_factor", gradient_predivide_factor)
            options.check_factor("loss_scale", loss_scale)
            options.check_seed("rota.HookState", seed)
            options.check_algorithm(algorithm)
            options.check_num_shards(num_shards)
            if model is not None:
                options.check_model("rota.HookState", model)
                self._model = NamedModel(model)
            self.group = group_of(group, model)

        if model_group is None:
            check()
        else:
            JointSteps.over(model_group, "HookState").step(check)
        self.engine = engine
        self.wire_dtype = wire_dtype
        self.block_scaling = in_blocks
        self.inter_wire_dtype = inter_wire_dtype
        self.stochastic_rounding = stochastic_rounding
        self.error_feedback = error_feedback
        self.gradient_predivide_factor = gradient_predivide_factor
        self.algorithm = algorithm
        self.num_shards = num_shards
        self.loss_scale = loss_scale
        self.model_group = ModelGroup(model_group, replicas) if model_group is not None else None
        self.results = Results(self.model_group)
        self._seed = seed
        self._num_reductions = 0
        self._num_before = 0  # the number before the last reduction of all gradients
        self._residuals = Residuals()
        self._parameters = SeenParameters()
        self._counts_all: dict[object, bool] = {}  # by mesh and placements
        self._entries = Entries()
        self._sharding: Sharding | None = None
        live_states.add(self)

    @property
    def loss_scale(self) -> float:
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        options.check_factor("loss_scale", loss_scale)
        self._loss_scale = float(loss_scale)

    @property
    def found_inf(self) -> bool:
        """Whether any gradient of the last backward pass has an Inf or NaN; the same on all ranks.

        With a model_group: any gradient of the model. It then waits until all of its ranks have
        reduced their gradients, as does grad_norm().

        Raises:
            RuntimeError: no backward pass is complete, or gradients were added since.
        """
        self._check_complete()
        return self.results.found_inf

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of all gradients of the last backward pass; the same bits on all ranks.

        Squares are summed in float64. The norm accounts for rota.clip_grad_norm_, but not for other
        changes of the gradients since.

        Returns:
            A float32 scalar.

        Raises as found_inf.
        """
        self._check_complete()
        return torch.tensor(
            math.sqrt(self.results.sum_of_squares), dtype=torch.float32, device="cpu"
        )

    def drop_results(self) -> None:
        """Call it, on every rank, if the gradients of the last backward pass will not be applied.

        Error feedback and stochastic rounding then go on from before it. They know without a call
        if gradients are not finite, or if a rota.amp.GradScaler skips the step.
        """
        self.results.outcome.drop()

    def _check_complete(self) -> None:
        if not self.results.is_complete:
            raise RuntimeError(
                "rota.HookState: there are no results: no backward pass has reduced the gradients "
                "to the end, or a GradScaler has had more added to them since; call backward() "
                "outside no_sync(), or rota.reduce_gradients, first"
            )

    # ---- saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """The state of the rounding stream and the residuals, to resume a run.

        The residuals belong to this rank: with error_feedback each rank saves and loads its own.

        Returns:
            A dict of "seed", "num_reductions", "residuals": float32 tensors (copies) with the
            shapes of the parameters, keyed by their names in the module that DDP wraps, and
            "without_residual": the names of the module's other parameters, such as frozen ones.

        Raises:
            RuntimeError: there are residuals, but the state was made without `model`, or the model
                no longer exists.
        """
        if self.error_feedback and self._model is not None and not self._model.is_alive:
            raise RuntimeError(
                "rota.HookState: the model is gone, and its residuals with it; call state_dict() "
                "while its DistributedDataParallel exists"
            )
        residuals = self._residuals.by_name(self._name_to_save)
        names = self._model.names if self._model is not None else set()
        return {
            "seed": self._seed,
            "num_reductions": self._num_used,
            "residuals": residuals,
            "without_residual": sorted(names - residuals.keys()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from a state_dict(); may be called before the first backward pass.

        A resumed run gives the bits of one that never stopped if its buckets are the same. DDP
        orders the buckets of a new process differently from those after the first step, and block
        scaling and stochastic rounding depend on that order. Layers may have been frozen or thawed
        since.

        Args:
            state_dict: from a state of the same model and rank.

        Raises:
            TypeError, ValueError: state_dict is of something else; nothing was loaded.
            ValueError: on the first bucket, if names or shapes differ from the model's.
        """
        keys = ("seed", "num_reductions", "residuals")
        options.check_state_dict("rota.HookState", state_dict, keys)
        saved, own = set(state_dict["residuals"]), self._model.names if self._model else set()
        if saved and own and saved.isdisjoint(own):
            raise ValueError(
                f"rota.HookState.load_state_dict: state_dict is of another model: it has "
                f"{min(saved)!r} and {len(saved) - 1} more parameters, this model has {min(own)!r} "
                f"and {len(own) - 1} more"
            )
        self._seed = state_dict["seed"]
        self._num_reductions = self._num_before = state_dict["num_reductions"]
        self._residuals.load(state_dict["residuals"], state_dict.get("without_residual", ()))
        self._entries.clear()

    def __copy__(self) -> HookState:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> HookState:
        """The same options, groups, residuals and place in the rounding stream.

        It is for the same model, or for its copy if that has been copied along, as by a copy of the
        DistributedDataParallel; and is registered with neither.
        """
        other = HookState(self.group, engine=self.engine, **self._options())
        other.model_group = self.model_group
        other.results = Results(self.model_group)
        if isinstance(self._model, NamedModel):
            other._model = self._model.copied(memo)
        other._seed = self._seed
        other._num_reductions = other._num_before = self._num_used
        other._residuals = self._residuals.copied(memo)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        if any(group is not None for group in (self.group, self.model_group, self.engine)):
            raise TypeError(
                "rota.HookState: cannot be pickled with a process group of its own; save "
                "state_dict() and load it into a new HookState"
            )
        if self.error_feedback and isinstance(self._model, NamedModel):
            raise TypeError(
                "rota.HookState: cannot be pickled with error_feedback, since the residuals need "
                "the model, which stays here; save state_dict() and load it into a new "
                "HookState(model=...). Of a DistributedDataParallel with this state, pickle the "
                "module inside"
            )
        return _restore, (self._options(), self.state_dict())

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    @property
    def communicator(self) -> Communicator:
        """That of all hooks of the group. Collective where it does not exist yet."""
        return communicator_of(self.group, self.engine)

    @property
    def has_memory(self) -> bool:
        """Whether a reduction depends on what became of the results of those before."""
        return self.error_feedback or self.stochastic_rounding

    # ---- one bucket

    def reduce(self, grad_bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a bucket of DDP's; fused_hook calls it."""
        if not self.results.continues(grad_bucket.parameters()):
            self.begin()
        may_have_unused = self._model is None or self._model.may_have_unused
        future = self.start(grad_bucket, may_have_unused)
        self.results.end_with_backward(self.error_feedback, self._end_backward)
        return future

    def begin(self) -> None:
        """Call it before the first bucket of a reduction."""
        last = self.results.outcome
        self._parameters.begin()
        if self.has_memory:
            last.freeze()
        self._num_reductions = self._num_used
        if not last.goes_on:
            self._num_before = self._num_reductions
        self.results.begin(self.loss_scale)
        if self._sharding is not None:
            self._sharding.begin()
        if self._model is not None and not self._model.is_alive:
            self._model = None

    def end(self, used: Set[int]) -> None:
        """Call it after the last bucket of a reduction, when gradients have been written.

        Args:
            used: the parameters that have a gradient on any rank, by id().
        """
        self.results.end(sends_without_gradient=self.error_feedback)
        self.results.close()
        self._end_backward(used)

    def _end_backward(self, used: Set[int] | None = None) -> None:
        self._check_parameters_seen()
        if self._sharding is not None:
            self._sharding.end(self.results.loss_scale, used)

    def shard(self, sharding: Sharding, caller: str) -> None:
        """Reduces gradients to the owners of their pieces from now on, for an optimizer.

        Raises ValueError: the state cannot be used for it.
        """
        if self._sharding is not None:
            raise ValueError(
                f"{caller}: the state has an optimizer of rota.optim already; make one "
                f"rota.HookState for each optimizer"
            )
        if self.model_group is not None:
            raise ValueError(
                f"{caller}: the state has a model_group, whose ranks would not know each other's "
                f"norms; use torch's optimizer with rota.clip_grad_norm_"
            )
        if not self._parameters.are_none:
            raise ValueError(
                f"{caller}: the state has reduced gradients before; make the optimizer before the "
                f"first backward pass"
            )
        self._sharding = sharding
        self.results.measure = sharding.totals

    @property
    def is_sharded(self) -> bool:
        """Whether sums stay with the owners of their pieces, so that no gradient is written."""
        return self._sharding is not None

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The one that the state was made with, if any."""
        return self._model.ddp if isinstance(self._model, NamedModel) else None

    def _check_parameters_seen(self) -> None:
        if self._parameters.end(self.results.seen, is_same_model=self._model is not None):
            return
        text = (
            "rota.fused_hook: no gradient of this backward pass is of a parameter that had one "
            "before, so it is of another model; make one rota.HookState for each model, or pass "
            "rota.HookState(model=...) if it trains other layers of the same one"
        )
        self.results.void()
        self._entries.clear()
        if self.model_group is not None:  # its other ranks may have seen nothing new
            self.model_group.abort(text)
        raise ValueError(text)

    @property
    def _num_used(self) -> int:
        was_dropped = self.has_memory and self.results.outcome.was_dropped
        return self._num_before if was_dropped else self._num_reductions

    def start(self, bucket: Bucket, may_have_unused: bool) -> torch.futures.Future[torch.Tensor]:
        """Starts the reduction of a bucket, in place.

        Args:
            bucket: the next one, on every rank.
            may_have_unused: the bucket may hold what will not be written to its gradient.
        """
        parameters, buffer = bucket.parameters(), bucket.buffer()
        entry = self._entries.of(parameters) or self._enter(bucket, parameters)
        residual = None
        if entry.residual is not None:
            residual = entry.residual.for_reduction(self.results.outcome)
        communicator = self.communicator
        num_summands = self.num_shards or communicator.world_size
        seed = None
        if self.stochastic_rounding:
            seed = split_mix_64(self._seed, self._num_reductions)
        wire_dtype, block_scaling = self.wire_dtype or buffer.dtype, self.block_scaling
        if self.inter_wire_dtype is not None and communicator.num_hosts > 1:
            wire_dtype = self.inter_wire_dtype
            block_scaling = options.scales_blocks(wire_dtype)
        reduction: dict[str, Any] = dict(
            wire_dtype=wire_dtype,
            block_scaling=block_scaling,
            contribution_factor=1 / self.gradient_predivide_factor,
            divisor=num_summands / self.gradient_predivide_factor,
            result_factor=1 / self.loss_scale,
            residual=residual,
            stochastic_seed=seed,
            order="rank" if self.num_shards is None else "tree",
            num_shards=self.num_shards,
        )
        if self._sharding is not None and entry.shards is not None:
            future = self._sharding.start(entry.shards, buffer, **reduction)
        else:
            future = communicator.reduce_bucket_future(
                buffer, entry.stats, algorithm=self.algorithm, **reduction
            )
        self._num_reductions += 1
        # torch sees no write: gradients that are views of the buffer would count as unchanged.
        torch.autograd.graph.increment_version(buffer)
        self.results.add_bucket(
            entry.parameters, entry.stats, buffer, may_have_unused, communicator.check_results
        )
        return future

    def replace_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes another list of parameters to reduce, or the same in other shapes.

        Raises ValueError: it has no parameter of the list before, whose model still exists, and
        `model` does not have them.
        """
        model = self._model
        is_same_model = model is not None and None not in map(model.name, parameters)
        if not self._parameters.replace(parameters, is_same_model):
            raise ValueError(
                "rota.reduce_gradients: the state has reduced the gradients of other parameters "
                "before; make one rota.HookState for each model"
            )
        self._entries.clear()

    def check_can_take_copies(self) -> None:
        """Raises ValueError: the state has reduced gradients, or has an option only for those."""
        if not self._parameters.are_none or isinstance(self._model, NamedCopies):
            raise ValueError(
                "rota.HookState: the state is in use for something else; make one of its own for "
                "each rota.LocalSGD and rota.DiLoCo"
            )
        if self.num_shards is not None or self.loss_scale != 1:
            raise ValueError(
                f"rota.HookState: num_shards is {self.num_shards}, loss_scale {self.loss_scale}; "
                f"they are for gradients, leave them out for rota.LocalSGD and rota.DiLoCo"
            )
        if self.model_group is not None and self.model_group.asks_replicas:
            raise ValueError(
                "rota.HookState: replicas would be asked about copies, which it does not know; "
                "leave it out for rota.LocalSGD and rota.DiLoCo"
            )

    def take_copies(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Makes this the state of copies of parameters, by the parameters' names, which may be
        reduced in parts; residuals of all exist from now on. Raises what check_can_take_copies()
        raises."""
        self.check_can_take_copies()
        self._model = NamedCopies(copies)
        if self.error_feedback:
            for copy in copies.values():  # one by one, so that each can be freed
                self._residuals.of_bucket([copy], self._name_to_save)

    def free_buckets(self) -> None:
        """Frees the memory of buckets until the next reduction."""
        self._entries.clear()
        self._residuals.free()

    def note_frozen(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call it with what is left out of a list of parameters to reduce."""
        self._parameters.note_frozen(parameters)

    def is_for(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is of the model whose gradients this state reduces, also frozen."""
        return (
            self._parameters.has(parameter)
            or self._parameters.has_frozen(parameter)
            or (self._model is not None and self._model.name(parameter) is not None)
        )

    def counts_all_of(self, parameter: torch.Tensor) -> bool:
        """Whether its norm and found_inf count all shards of a parameter, if that is a DTensor."""
        dtensor = as_dtensor(parameter)
        if dtensor is None:
            return True
        placed = dtensor.device_mesh, dtensor.placements
        if placed not in self._counts_all:
            shards = shard_of_rank(dtensor)
            ranks = [dist.get_rank()] if self.model_group is None else self.model_group.ranks
            counted = {shards[rank] for rank in ranks if rank in shards}
            self._counts_all[placed] = counted == set(shards.values())
        return self._counts_all[placed]

    @property
    def is_for_nothing(self) -> bool:
        """Whether this rank's part of the model has no parameters, as far as is known."""
        return self._parameters.are_none_of_model

    def name_of(self, parameter: torch.Tensor, place: str) -> str:
        """The parameter's name in the model, or its place and shape if the model is not known.

        Raises:
            ValueError: it is not in the model.
        """
        name = f"parameter {place}, shape {list(parameter.shape)}"
        if self._model is None:
            return name
        known_name = self._model.name(parameter)
        if known_name is None:
            raise ValueError(
                f"rota.fused_hook: {name}, is not in the model that rota.HookState was made with; "
                f"make one rota.HookState for each model"
            )
        return repr(known_name)

    def _enter(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> Entry:
        """Checks a bucket that is new or has other parameters than before."""
        self._parameters.add_bucket(bucket.index(), parameters)
        places = (f"{i} of bucket {bucket.index()}" for i in range(len(parameters)))
        names = [self.name_of(p, place) for p, place in zip(parameters, places, strict=True)]
        check_buffer(bucket.buffer(), names[0])
        residual = None
        if self.error_feedback:
            if self._model is not None:
                self._residuals.check_loaded(self._model.names, self._model.reduced_names)
            residual = self._residuals.of_bucket(parameters, self._name_to_save)
        shards = None if self._sharding is None else self._sharding.bucket_of(parameters)
        return self._entries.add(bucket, residual, shards)

    def _name_to_save(self, parameter: torch.Tensor) -> str:
        name = self._model.name(parameter) if self._model is not None else None
        if name is None:
            raise RuntimeError(
                "rota.HookState: residuals are saved and restored under the names of parameters, "
                "which are not known; make the state with rota.HookState(model=ddp, ...)"
            )
        return name


def _restore(options: dict[str, Any], state_dict: dict[str, Any]) -> HookState:
    state = HookState(**options)
    state.load_state_dict(state_dict)
    return state


@contextlib.contextmanager
def telling_peers(state: object) -> Iterator[None]:
    """An error that is raised inside makes the other ranks' reductions fail with its text."""
    try:
        yield
    except RotaError:
        raise  # peers already know
    except Exception as error:
        tell_peers(state, str(error))
        raise


def tell_peers(state: object, reason: str) -> None:
    """Makes the reductions of the other ranks of a state, or of a group, fail with this reason."""
    group = state.group if isinstance(state, HookState) else state
    with contextlib.suppress(RotaError, ValueError):  # an error here would only hide `reason`
        tell_peers_of(group if isinstance(group, dist.ProcessGroup) else None, reason)
    if isinstance(state, HookState) and state.model_group is not None:
        state.model_group.abort(reason)
