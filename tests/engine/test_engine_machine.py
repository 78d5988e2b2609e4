"""Requests come, go, fork, are evicted and aborted in any order, and every answer is what it is alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from support.engine_machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
