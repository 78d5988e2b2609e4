"""Requests are added, forked, evicted and aborted in any order, and each result is the same as alone."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from support.engine_machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
