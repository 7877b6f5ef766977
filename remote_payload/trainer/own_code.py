"""Compiled functions that no two threads share: a code object's cache may be searched by one thread only.

Dynamo keeps that cache as a list, moves the entry found to its front, and lets other threads run while it
checks an entry's guards. An entry that another thread moves meanwhile is missed: what exists compiles again,
and after `recompile_limit` such misses the function runs eagerly, without a word. Two threads that call one
function at two shapes meet this within a second on torch 2.11 and 2.13 (tests/trainer/test_own_code.py); two
drafters on an H200 met it after 650 rows. A code object of its own gives each caller a cache and a limit.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function over a code object of its own."""
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def compile_own(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """`function` compiled whole, at fixed shapes, for calls from one thread at a time."""
    return torch.compile(own(function), dynamic=False, fullgraph=True, backend=backend)
