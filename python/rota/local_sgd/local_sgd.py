"""Local SGD: decides what is synchronised when, and must not know how.

The difference of a parameter is the gradient of a float32 copy of it. So gradients/ reduces it,
with all options of a HookState, and any optimizer can step the copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rota import options
from rota.gradients.reduction import Reduction, free_buckets
from rota.gradients.state import HookState, telling_peers
from rota.local_sgd import checks
from rota.local_sgd.synced import Synced, copy_of, cut, tensors_to_sync
from rota.rendezvous.alike import check_alike
from rota.rendezvous.groups import member_group
from rota.rendezvous.joint import JointSteps
from rota.sharding import local_of, own_shard

BUCKET_CAP_MB = 25.0

# The keys of a state_dict().
SAVED = "num_steps", "num_skipped", "synced_at", "rank", "world_size", "parameters", "state"


class _InFlight(NamedTuple):
    """An outer step that has begun."""

    number: int  # of the fragment
    reduction: Reduction
    end_step: int  # when its result is applied


class LocalSGD:
    """Local SGD: every `sync_every` steps, parameters become their average over the workers.

    A worker is one rank, or several ranks whose parameters stay equal because their gradients are
    averaged in every step, as by DistributedDataParallel.

    What travels is the difference of each parameter since its last synchronisation, in the wire
    dtype of the state, with float32 sums; docs/local-sgd.md has the memory that it takes. Buffers
    of floating point that are in the model's state_dict are averaged with the parameters. Other
    buffers, and parameters that required no gradient when this was made, stay as each rank has
    them.

    If a difference is Inf or NaN on any rank, all ranks drop it and go on from the last
    synchronisation: parameters and buffers get their values from there. Inner optimizers are not
    touched; one whose moments are NaN has to be made anew.

    Args:
        model: the same on every rank of the state's group; a DistributedDataParallel, or a module
            that fully_shard has sharded, must be made before this. The group's rank 0 broadcasts
            its parameters and buffers, as DistributedDataParallel does.
        sync_every: H, inner steps between two synchronisations of a parameter.
        state: over which ranks and how differences travel; one made for this alone. None: in
            float32, over the default group. One over the i-th rank of each worker counts workers
            alike, one over all ranks as often as they have ranks. If a worker's ranks hold
            different parts of the model, pass them as its model_group, over the first kind.
        num_fragments: P, parts of about the same size, which are synchronised at P steps spread
            over sync_every (Streaming DiLoCo).
        fragment_sync_delay: inner steps that run while a fragment is reduced; its result is applied
            after them. Less than sync_every // num_fragments.
        fragment_update_alpha: a synchronised parameter becomes alpha times this rank's, plus
            1 - alpha times the workers' common one. With 0, what the steps of the delay have
            changed is lost; Streaming DiLoCo uses 0.5.

    Raises:
        TypeError, ValueError: an argument is invalid; the text says what is valid. The other ranks
            raise rota.TransportError, which names the rank.
        rota.Mismatch: the ranks' models or arguments differ.

    It is a collective call over the state's group, and blocks. Names are those of torchft.

    Example:
        >>> outer = rota.local_sgd.LocalSGD(model, sync_every=8)
        >>> for inputs, targets in loader:
        ...     loss_of(model(inputs), targets).backward()
        ...     optimizer.step()
        ...     outer.step()
        ...     optimizer.zero_grad()
        >>> outer.sync()
    """

    def __init__(
        self,
        model: nn.Module,
        sync_every: int,
        *,
        state: HookState | None = None,
        num_fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        self.sync_every = sync_every
        self.num_fragments = num_fragments
        self.fragment_sync_delay = fragment_sync_delay
        self.fragment_update_alpha = fragment_update_alpha
        self.num_steps = 0  # that step() has counted
        self.num_skipped = 0  # outer steps that were dropped, of one fragment each
        module = model.module if isinstance(model, DistributedDataParallel) else model
        tensors: dict[str, torch.Tensor] = {}

        def check() -> dict[str, object]:
            tensors.update(tensors_to_sync(self._name, module))
            self._check_arguments(module, len(tensors))
            self.state = HookState(wire_dtype=torch.float32) if state is None else state
            if not isinstance(self.state, HookState):
                raise TypeError(
                    f"{self._name}: state is of type {type(state).__name__}, expected a HookState"
                )
            self.state.check_can_take_copies()
            checks.check_shards(self._name, module, self.state)
            shards = (own_shard(tensor) for tensor in tensors.values())
            return {
                "class": type(self).__name__,
                "sync_every": sync_every,
                "num_fragments": num_fragments,
                "fragment_sync_delay": fragment_sync_delay,
                "num_tensors": len(tensors),
                "shard": next((shard for shard in shards if shard is not None), 0),
                **self._other_arguments(),
            }

        group = state.group if isinstance(state, HookState) else None
        steps = JointSteps.over(member_group(group, "LocalSGD"), "LocalSGD", self._name)
        check_alike(self._name, steps.step(check))
        self._module = module
        self._synced = [
            Synced(
                name, module, tensor if isinstance(tensor, nn.Parameter) else None, copy_of(tensor)
            )
            for name, tensor in tensors.items()
        ]
        self._fragments = cut(self._synced, num_fragments)
        self._synced_at = [0] * num_fragments  # the step of each fragment's last difference
        self._in_flight: _InFlight | None = None
        self.state.take_copies({synced.name: synced.copy for synced in self._synced})
        with telling_peers(self.state), torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                local = local_of(tensor.detach())
                local = torch.view_as_real(local) if local.is_complex() else local
                self.state.communicator.broadcast(local, 0)
        for synced in self._synced:
            synced.copy.detach().copy_(synced.local)

    @property
    def _name(self) -> str:
        return f"rota.{type(self).__name__}"

    # ---- the training loop

    def step(self) -> None:
        """Counts an inner step, and does the outer step that is due; call it on every rank.

        Blocks when parameters are synchronised, until the other ranks of the state's group have
        come; with a delay, not before its end. The gradients of the model are not touched.

        Raises:
            rota.Mismatch: the ranks are at different steps; parameters stay as they were.
            ValueError: the model has parameters to train that it had not when this was made, or
                that were frozen then; names them.
            rota.Timeout, rota.PeerFailed: a rank did not come, or failed; names it.
        """
        self.num_steps += 1
        if self._in_flight is not None and self.num_steps >= self._in_flight.end_step:
            self._finish(self._in_flight)
        for i in range(self.num_fragments):
            offset = (i + 1) * self.sync_every // self.num_fragments
            if (self.num_steps - offset) % self.sync_every == 0:
                self._in_flight = self._start(i)
                if self.fragment_sync_delay == 0:
                    self._finish(self._in_flight)

    def sync(self) -> None:
        """Does the outer steps of all fragments now, such as after the last inner step.

        Passes over a fragment without a step since its last: momentum alone would move it.

        Raises what step() raises.
        """
        if self._in_flight is not None:
            self._finish(self._in_flight)
        for i in range(self.num_fragments):
            if self._synced_at[i] != self.num_steps:
                self._in_flight = self._start(i)
                self._finish(self._in_flight)

    @torch.no_grad()
    def _start(self, number: int) -> _InFlight:
        with telling_peers(self.state):
            checks.check_all_synced(self._name, self._module, self._synced)
        fragment = self._fragments[number]
        self._synced_at[number] = self.num_steps
        for synced in fragment:
            synced.copy.grad = synced.copy.detach() - synced.local
        with telling_peers(self.state):
            copies = [synced.copy for synced in fragment]
            reduction = Reduction(copies, self.state, BUCKET_CAP_MB)
            reduction.start()
        return _InFlight(number, reduction, self.num_steps + self.fragment_sync_delay)

    @torch.no_grad()
    def _finish(self, in_flight: _InFlight) -> None:
        self._in_flight = None
        fragment, reduction = self._fragments[in_flight.number], in_flight.reduction
        try:
            with telling_peers(self.state):
                reduction.finish()
            checks.check_agreement(self._name, self.state, self._agreed())
            if self.state.found_inf:
                self._skip(fragment)
                return
            self._update_copies(fragment)
        except BaseException:
            self.state.drop_results()
            raise
        finally:
            free_buckets(self.state)
            for synced in fragment:
                synced.copy.grad = None
        for synced in fragment:
            common, local = synced.copy.detach(), synced.local
            if self.fragment_update_alpha > 0:
                common = torch.lerp(common, local.to(common.dtype), self.fragment_update_alpha)
            local.copy_(common)

    def _update_copies(self, fragment: Sequence[Synced]) -> None:
        """Takes the outer step; the copies' gradients are the mean differences."""
        for synced in fragment:
            assert synced.copy.grad is not None
            synced.copy.sub_(synced.copy.grad)

    def _skip(self, fragment: Sequence[Synced]) -> None:
        self.num_skipped += 1
        bad = [synced.name for synced in fragment if not synced.local.isfinite().all()]
        if bad:
            warnings.warn(
                f"{self._name}: {bad[0]!r} and {len(bad) - 1} more are Inf or NaN on rank "
                f"{dist.get_rank(self.state.group)} after step {self.num_steps}; all ranks go on "
                f"from their last synchronisation. If it comes again, the moments of the inner "
                f"optimizer may not be finite either",
                stacklevel=4,
            )
        for synced in fragment:
            synced.local.copy_(synced.copy)

    # ---- saving and restoring

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common, and this rank's residuals, to resume a run.

        Save it beside the model and the inner optimizer, which differ between workers except right
        after a synchronisation.

        Returns:
            A dict of "num_steps", "num_skipped", "synced_at": the step of each fragment's last
            synchronisation, "rank" and "world_size" in the state's group, "parameters": the copies
            by name, which share their memory, and "state", as by HookState.state_dict().
            DiLoCo adds "outer_optimizer".

        Raises:
            RuntimeError: a fragment is being reduced.
        """
        self._check_at_rest("state_dict")
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "synced_at": list(self._synced_at),
            "rank": dist.get_rank(self.state.group),
            "world_size": dist.get_world_size(self.state.group),
            "parameters": {synced.name: synced.copy.detach() for synced in self._synced},
            "state": self.state.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state_dict(), with the same or another number of workers.

        Load the model, too: this leaves it alone. A worker that did not exist before takes the
        model of another. Residuals are dropped unless the same rank of as many saved them.

        Raises:
            RuntimeError: a fragment is being reduced.
            TypeError, ValueError: state_dict is of something else, or the names or shapes are not
                those of this model.
        """
        self._check_at_rest("load_state_dict")
        options.check_state_dict(self._name, state_dict, SAVED)
        parameters = state_dict["parameters"]
        checks.check_saved(self._name, self._synced, parameters)
        for synced in self._synced:
            synced.copy.detach().copy_(parameters[synced.name])
        self.state.load_state_dict(
            {**state_dict["state"], "residuals": self._residuals_of(state_dict)}
        )
        self.num_steps = state_dict["num_steps"]
        self.num_skipped = state_dict["num_skipped"]
        # Other fragments than were saved are synchronised by the next sync(), whatever their step.
        synced_at = list(state_dict["synced_at"])
        self._synced_at = (
            synced_at if len(synced_at) == self.num_fragments else [-1] * self.num_fragments
        )

    def _residuals_of(self, state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        place = dist.get_rank(self.state.group), dist.get_world_size(self.state.group)
        residuals: dict[str, torch.Tensor] = state_dict["state"]["residuals"]
        if not self.state.error_feedback:
            return {}
        if residuals and (state_dict["rank"], state_dict["world_size"]) == place:
            return residuals
        return {
            synced.name: torch.zeros(synced.copy.shape, dtype=torch.float32, device="cpu")
            for synced in self._synced
        }

    def _check_at_rest(self, method: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(
                f"{self._name}.{method}: a fragment is being reduced until step "
                f"{self._in_flight.end_step}, this is step {self.num_steps}; call it then, or "
                f"after sync() on every rank"
            )

    # ---- what a subclass adds

    def _check_arguments(self, module: nn.Module, num_tensors: int) -> None:
        checks.check_arguments(self._name, self, module, num_tensors)

    def _other_arguments(self) -> dict[str, str]:
        """What a subclass also compares between ranks, by name."""
        return {}

    def _agreed(self) -> dict[str, float]:
        """What ranks must have alike at each outer step, by name."""
        return {"step": self.num_steps}
