"""Parameters for tests of every update rule, as kernels/rules.h lists them."""

from __future__ import annotations

COMMON = (0.05, 0.03, 0.25, 0.3)
PARAMS: dict[str, tuple[float, ...]] = {
    "sgd": COMMON,
    "sgd_momentum": (*COMMON, 0.9),
    "nag": (*COMMON, 0.9),
    "adam": (*COMMON, 0.8, 0.999, 1e-4),
    "adamw": (*COMMON, 0.8, 0.999, 1e-4),
    "adagrad": (*COMMON, 1e-5),
    "adadelta": (*COMMON, 0.9, 1e-5),
    "adamax": (*COMMON, 0.8, 0.999, 1e-6),
    "nadam": (*COMMON, 0.8, 0.999, 1e-6, 0.4, 0.41, 0.6, 0.8, 0.05),
    "rmsprop": (*COMMON, 0.9, 1e-6, 2.0),
    "rmsprop_centered": (*COMMON, 0.9, 1e-3, 2.0, 0.7),
    "ftrl": (*COMMON, 0.2, 0.7),
    "ftml": (*COMMON, 0.6, 0.999, 1e-6, 0.4, 0.001),
    "signum": (*COMMON, 0.9, 0.01),
    "signsgd": COMMON,
    "sgld": (*COMMON, 7, 0xDEADBEEF, 3, 0),
    "dcasgd": (*COMMON, 0.04),
    "dcasgd_momentum": (*COMMON, 0.04, 0.9),
    "lamb_moments": (*COMMON, 0.8, 0.999, 1e-4, 0.2, 0.001),
    "lamb_apply": (*COMMON, 0.8, 0.999, 1e-4, 0.2, 0.001),
    "test": COMMON,
}
