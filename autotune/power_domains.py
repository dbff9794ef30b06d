"""Power domains as a tree: which nodes draw from which, what a trial took from them, and mistakes in a study's list of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.power_metrics import PEAK_WINDOWS_S
from autotune.spec_errors import nearest, wrong
from autotune.spec_parts import PowerDomain
from autotune.wall_metrics import DOMAIN, POOL
from search_spaces.hardware import PoolSpec


@dataclass(frozen=True, slots=True)
class DomainLimit:
    """What a domain may give, as a bound on trials that were measured at the wall. Guards hold launches to it, measured or not.

    Attributes:
        name: The domain.
        limit_w: Watts that it may give.
        window_s: Seconds over which these are a mean.
        share: Share of a trial's nodes that draw from it.
    """

    name: str
    limit_w: float
    window_s: float
    share: float

    def measured(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """The metric that tells its watts, and these; None where nothing was measured at the wall.

        The domain's own log tells them best; else the trial's nodes do, each with an equal share. Where the readings are too far
        apart for `window_s`, the next longer window stands for it: what is above the limit there was above it before.
        """
        for scope, share in ((f"{DOMAIN}{self.name}_", 1.0), (POOL, self.share)):
            for seconds in PEAK_WINDOWS_S:
                name = f"{scope}peak_power_w_{seconds:g}s"
                if seconds >= self.window_s and name in metrics:
                    return name, metrics[name] * share
        return None


def domain_limits(domains: Sequence[PowerDomain], pool: PoolSpec) -> tuple[DomainLimit, ...]:
    """The limits of all domains that a pool's trials draw from."""
    fed = [(domain, nodes_fed(domain, pool, domains)) for domain in domains]
    return tuple(DomainLimit(domain.name, domain.limit_w, domain.window_s, nodes / pool.nodes) for domain, nodes in fed if nodes)


def nodes_fed(domain: PowerDomain, pool: PoolSpec, domains: Sequence[PowerDomain]) -> int:
    """Nodes of a trial on `pool` that draw from `domain`, at most."""
    if isinstance(domain.nodes, int):
        return min(domain.nodes, pool.nodes)
    inner = {other.name: other for other in domains}
    fed = sum(nodes_fed(inner[name], pool, domains) for name in domain.nodes if name in inner)
    return pool.nodes if pool.name in domain.nodes else min(fed, pool.nodes)


def share_power(one: PoolSpec, other: PoolSpec, domains: Sequence[PowerDomain]) -> bool:
    """Whether nodes of both pools may draw from one domain; one that only says how many nodes it carries may feed any pool's."""
    return any(nodes_fed(domain, one, domains) and nodes_fed(domain, other, domains) for domain in domains)


def check_domains(domains: Sequence[PowerDomain], pools: Sequence[PoolSpec]) -> None:
    """For the study's validator: names are known and differ, nothing is in two domains, and none is in itself.

    Raises:
        PydanticCustomError: with the field below the study.
    """
    names, pool_names = [domain.name for domain in domains], [pool.name for pool in pools]
    for position, name in enumerate(names):
        if name in names[:position] or name in pool_names:
            hint = "every domain and every pool needs a name of its own"
            raise wrong(f"power_domains[{position}].name", name, "is the name of another domain or pool", hint)
    there = sum(max(pool.node_counts) for pool in pools)
    for position, domain in enumerate(domains):
        if isinstance(domain.nodes, int) and domain.nodes > there:
            hint = f"give at most {there}, or the names of the pools that it feeds, e.g. [{pool_names[0]}]"
            raise wrong(f"power_domains[{position}].nodes", domain.nodes, f"is more than the {there} nodes of all pools", hint)
    listed: Counter[str] = Counter()
    for position, domain in enumerate(domains):
        for name in domain.nodes if not isinstance(domain.nodes, int) else ():
            field = f"power_domains[{position}].nodes"
            if name not in names and name not in pool_names:
                raise wrong(field, name, "is neither a pool nor a power domain", nearest(name, [*pool_names, *names]))
            listed[name] += 1
            if listed[name] > 1:
                raise wrong(field, name, "is in more than one place", "name it once, in the domain right above it")
    _check_no_circle({domain.name: domain for domain in domains})


def _check_no_circle(domains: Mapping[str, PowerDomain]) -> None:
    """Each is listed once at most, so that a walk upwards meets its start again or ends."""
    above = {name: outer.name for outer in domains.values() if not isinstance(outer.nodes, int) for name in outer.nodes}
    for position, name in enumerate(domains):
        outer, seen = above.get(name), {name}
        while outer is not None and outer not in seen:
            seen.add(outer)
            outer = above.get(outer)
        if outer is not None:
            raise wrong(f"power_domains[{position}].nodes", name, "is inside itself", "list only what is below a domain")
