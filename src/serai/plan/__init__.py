"""Predict what fits, how fast, how sure and at what cost; no torch, no network, no GPU.

from serai.plan import Model, Cluster, Layout, predict
p = predict(Model("gpt", 96, 12288, 96), Cluster.named("ndm-a100-v4", 16), Layout(zero=3, recompute="full"))
"""

from serai.plan.cluster import Cluster
from serai.plan.cost import checkpoint_budget, data_budget, training
from serai.plan.goodput import daly_interval, expected_goodput, simulate, young_interval
from serai.plan.layout import Layout
from serai.plan.model import Model
from serai.plan.predict import Prediction, Term, predict
from serai.plan.search import SearchResult, scaling, search, sensitivity

__all__ = [
    "Cluster",
    "Layout",
    "Model",
    "Prediction",
    "SearchResult",
    "Term",
    "checkpoint_budget",
    "daly_interval",
    "data_budget",
    "expected_goodput",
    "predict",
    "scaling",
    "search",
    "sensitivity",
    "simulate",
    "training",
    "young_interval",
]
