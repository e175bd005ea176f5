"""Collectives on two tiers: an NVLink domain, and the network between nodes. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from serai.plan.cluster import Cluster
from serai.plan.constants import Constants

__all__ = ["Group", "all_gather", "all_reduce", "all_to_all", "group", "send"]


@dataclass(frozen=True)
class Group:
    """``size`` ranks that are ``stride`` apart; ``per_node`` of them share a domain, ``nodes`` domains in all.

    ``rate_in`` and ``rate_out`` are bytes per second for one rank inside, and for one group's share of a
    domain's network outside (``line_out`` its line rate); ``alpha`` is the latency of one collective.
    """

    size: int
    per_node: int
    nodes: int
    rate_in: float
    rate_out: float
    alpha: float
    line_out: float = float("inf")


def node_rate(cluster: Cluster, k: Constants, nodes: float) -> float:
    """What collectives get of one node's network when ``nodes`` take part, bytes per second.

    ``inter`` · (nodes/16) ** -decay of the line rate, never above 92 % of it.
    """
    share = k.inter * float((max(nodes, 2.0) / 16.0) ** -k.decay)
    return cluster.node_bytes_per_s * min(share, 0.92)


def group(cluster: Cluster, k: Constants, size: int, stride: int) -> Group:
    """The group of ``size`` ranks at distance ``stride`` (the product of the inner parallel sizes)."""
    domain = min(cluster.domain, cluster.gpus)
    per_node = max(1, min(size, domain // stride if stride < domain else 1))
    nodes = max(1, -(-size // per_node))
    rate_in = cluster.intra_node_gbps * 1e9 * k.intra
    machines = max(1, domain // cluster.gpus_per_node)
    rate_out = line_out = float("inf")
    if nodes > 1:
        sharing = min(stride, domain)  # groups that leave the domain at the same time
        rate_out = node_rate(cluster, k, nodes * machines) * machines / sharing
        line_out = cluster.node_bytes_per_s * machines / sharing
    alpha = k.alpha_us * 1e-6 * (1 + (log2(nodes) if nodes > 1 else 0))
    return Group(size, per_node, nodes, rate_in, rate_out, alpha, line_out)


def all_gather(g: Group, size: float) -> float:
    """All-gather (or reduce-scatter) to ``size`` bytes: rings inside and outside run as a pipeline."""
    if g.size <= 1:
        return 0.0
    inside = size * (g.per_node - 1) / g.per_node / g.rate_in if g.per_node > 1 else 0.0
    outside = size * (g.nodes - 1) / g.nodes / g.rate_out if g.nodes > 1 else 0.0
    return g.alpha + max(inside, outside)


def all_reduce(g: Group, size: float) -> float:
    """Reduce-scatter and all-gather of ``size`` bytes, one latency."""
    if g.size <= 1:
        return 0.0
    return 2 * all_gather(g, size) - g.alpha


def all_to_all(g: Group, size: float) -> float:
    """Each rank sends ``size`` bytes in all, evenly to the others."""
    if g.size <= 1:
        return 0.0
    near = (g.per_node - 1) / g.size
    far = (g.size - g.per_node) / g.size
    # every GPU drives its own NIC, which rings at ``inter`` of the line do not
    outside = size * far * g.per_node / max(g.rate_out, 0.6 * g.line_out) if g.nodes > 1 else 0.0
    return g.alpha + max(size * near / g.rate_in, outside)


def send(cluster: Cluster, k: Constants, size: float, *, inside: bool) -> float:
    """One rank sends ``size`` bytes to its neighbour; outside it has its GPU's share of the node network."""
    if inside:
        return k.alpha_us * 1e-6 + size / (cluster.intra_node_gbps * 1e9 * k.intra)
    return 2 * k.alpha_us * 1e-6 + size / (node_rate(cluster, k, 2) / cluster.gpus_per_node)
