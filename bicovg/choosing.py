"""Which engine runs a training: the one asked for, or the next best, with one line saying why."""

import gc

import torch
from torch.optim import Optimizer

from bicovg.blocks import Block
from bicovg.captured import GraphEngine
from bicovg.config import Config
from bicovg.data.loader import Loader
from bicovg.distributed import ALONE, Processes, Team
from bicovg.engine import CompiledEngine, EagerEngine, PlainEngine
from bicovg.errors import UserError, chain_of, first_cause
from bicovg.goodness import BiCovG
from bicovg.networks import LocalNetwork
from bicovg.reduction import UnitReduction
from bicovg.signals import wake_autograd
from bicovg.synced_norm import apply_norm_stats

ENGINES = ("auto", "graph", "compiled", "eager", "plain")


def fall_back(engine: EagerEngine, error: Exception) -> EagerEngine:
    """The next best engine in the place of one whose ``warm_up`` failed, with one line saying why; or the error again.

    Nothing helps where memory ran out, and what is wrong in an eager step is no matter of engines. A capture that fails
    leaves torch's allocator as if it went on, which costs memory but changes no result.
    """
    kind = {GraphEngine: CompiledEngine, CompiledEngine: EagerEngine}.get(type(engine))
    causes = list(chain_of(error))
    if kind is None or any(isinstance(cause, torch.OutOfMemoryError | UserError) for cause in causes):
        raise error
    print(f"engine {engine.name} failed ({first_cause(error)}): running {kind.name}", flush=True)
    for unit in engine.net.units:
        vars(unit).pop("forward", None)  # a compiled one
        for module in unit.modules():
            if isinstance(module, Block):
                module.emitted = module.aside = module.shadow = None
            elif isinstance(module, BiCovG):
                module.shadow = None
    engine.lanes = None  # what its streams were to keep
    following = kind(engine.net, engine.optimizers, engine.config, engine.loader)
    if engine.loader.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return following


def make_engine(
    net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader, team: Team = ALONE
) -> EagerEngine:
    """The engine of this process: of one stage, or of the whole network, its gradients averaged over the team's."""
    wake_autograd(loader.device)
    if team.stages > 1:
        from bicovg.stages import StageEngine

        assert isinstance(team, Processes)
        return StageEngine(net, optimizers, config, loader, team)
    if not isinstance(team, Processes):
        return choose_engine(net, optimizers, config, loader, team)
    apply_norm_stats(net, config, team)
    engine = choose_engine(net, optimizers, config, loader, team)
    engine.reduction = UnitReduction(team, config.train.batch_norm_stats == "local")
    return engine


def choose_engine(
    net: LocalNetwork, optimizers: list[Optimizer], config: Config, loader: Loader, team: Team
) -> EagerEngine:
    """The engine ``train.engine`` asks for; where it cannot run, the next best, with one line saying why."""
    wanted, on_gpu = config.train.engine, loader.device.type == "cuda"
    arguments = (net, optimizers, config, loader)
    if on_gpu:
        torch.backends.cudnn.benchmark = not config.train.deterministic
        torch.backends.cuda.matmul.allow_tf32 = config.train.precision == "bfloat16"  # the readouts' float32 products
    if wanted == "plain":
        return PlainEngine(*arguments)
    if wanted == "eager" or (wanted == "auto" and not on_gpu):
        return EagerEngine(*arguments)
    if not on_gpu:
        if wanted == "compiled":
            return CompiledEngine(*arguments)
        print("engine graph needs a CUDA device: running eager", flush=True)
        return EagerEngine(*arguments)
    if wanted in ("auto", "graph") and team.world > 1:
        print("engine graph is for one process: running compiled", flush=True)
    elif wanted in ("auto", "graph"):
        if loader.resident_images is not None:
            return GraphEngine(*arguments)
        print("engine graph needs the data set on the device, and it does not fit: running compiled", flush=True)
    return CompiledEngine(*arguments)
